"""A line on stderr every few steps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

from zero_ext.config.events import DeviceStepEnd, Event, StepEnd
from zero_ext.monitor.metric_row import Source

_SHOWN = {"time": (" s", 1.0), "wait": (" s", 1.0), "memory": (" GiB", 2.0**-30), "flops": ("", 1.0)}


class StepLog:
    """Print a line to stderr every few steps.

    A subscriber. A line has step, loss, rates, gradient norm, loss scale and time, and of that step what
    `sources` say of times and memory. Loss and norm of an accelerator are those of an earlier step, as a rule
    the one before, and say so.

    Args:
        steps: steps from line to line.
        sources: get the events before this does.
    """

    def __init__(self, steps: int, sources: Sequence[Source] = ()) -> None:
        self._steps = steps
        self._sources = tuple(sources)
        self._seconds = 0.0
        self._skipped = 0
        self._arrived: DeviceStepEnd | None = None

    def __call__(self, event: Event) -> None:
        """Print a line if a step ends that is due.

        Args:
            event: any event of an engine.
        """
        if isinstance(event, DeviceStepEnd):
            self._arrived = event
        if not isinstance(event, StepEnd):
            return
        self._seconds += event.seconds
        self._skipped += event.skipped
        if event.step % self._steps:
            return
        facts = [f"step {event.step}", *self._late("loss", event, event.loss)]
        facts.append("lr " + ", ".join(f"{lr:.4g}" for lr in event.lr))
        facts += self._late("gradient norm", event, event.grad_norm)
        if event.loss_scale != 1.0:
            facts.append(f"loss scale {event.loss_scale:g}, {self._skipped} skipped")
        facts.append(f"{self._seconds / self._steps:.3g} s a step")
        facts += self._groups(event)
        print(" | ".join(facts), file=sys.stderr, flush=True)
        self._seconds, self._skipped = 0.0, 0

    def _late(self, what: Literal["loss", "gradient norm"], event: StepEnd, value: float | None) -> list[str]:
        """Return a number of the step that ``event`` reports, or of the last one that the device has
        ended.
        """
        if value is not None:
            return [f"{what} {value:.4g}"]
        arrived = self._arrived
        if arrived is None or arrived.step <= event.step - self._steps:
            return []
        late = arrived.loss if what == "loss" else arrived.grad_norm
        return [] if late is None else [f"{what} of step {arrived.step} {late:.4g}"]

    def _groups(self, event: StepEnd) -> list[str]:
        found: dict[str, list[str]] = {}
        for source in self._sources:
            for name, value in source.values(event).items():
                group, _, what = name.partition("/")
                if group in _SHOWN and value and not isinstance(value, tuple):
                    unit, factor = _SHOWN[group]
                    found.setdefault(group, []).append(f"{what} {value * factor:.3g}{unit}")
        return [f"{group}: {', '.join(values)}" for group, values in found.items()]
