"""A line on stderr every few steps."""

from __future__ import annotations

import sys

from zero_ext.config.events import Event, StepEnd


class StepLog:
    """Subscriber that prints step, rates, gradient norm, loss scale and time every ``steps`` steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._seconds = 0.0
        self._skipped = 0

    def __call__(self, event: Event) -> None:
        """Takes the event; anything but the end of a step is ignored."""
        if not isinstance(event, StepEnd):
            return
        self._seconds += event.seconds
        self._skipped += event.skipped
        if event.step % self._steps:
            return
        facts = [f"step {event.step}", "lr " + ", ".join(f"{lr:.4g}" for lr in event.lr)]
        if event.grad_norm is not None:
            facts.append(f"gradient norm {event.grad_norm:.4g}")
        if event.loss_scale != 1.0:
            facts.append(f"loss scale {event.loss_scale:g}, {self._skipped} skipped")
        facts.append(f"{self._seconds / self._steps:.3g} s a step")
        print(" | ".join(facts), file=sys.stderr, flush=True)
        self._seconds, self._skipped = 0.0, 0
