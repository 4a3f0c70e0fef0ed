"""The parts of a step's time: phases, and waits in them."""

from __future__ import annotations

from collections import defaultdict

from zero_ext.config.events import CollectiveEnd, Event, PhaseEnd, StepEnd, WaitEnd
from zero_ext.monitor.metric_row import Value

PHASES = ("forward", "backward", "step")
WAITS = ("gather", "reduce", "agreement", "storage", "update")


def wait_of(kind: str) -> str:
    """Return which of `WAITS` a collective of this kind is."""
    if kind == "activations" or (kind.startswith("gather") and not kind.startswith("gather_gradients")):
        return "gather"
    if kind.startswith(("reduce_scatter", "gather_gradients")):
        return "reduce"
    return "agreement"


class StepTimes:
    """Source of the seconds that a step's phases took, and that the host waited in them.

    `time/forward`, `time/backward` and `time/step` are the phases, `time/other` is the rest of
    `seconds`: data, the loss, whatever else the loop does. `wait/gather` (parameters, partitioned
    activations), `wait/reduce` (gradients), `wait/agreement` (norms, flags), `wait/storage` (NVMe)
    and `wait/update` (a delayed one) are part of these and never overlap. On an accelerator all of them
    are the host's times. A monitor's rows have those of its stream as well.
    """

    def __init__(self) -> None:
        self._running: defaultdict[str, float] = defaultdict(float)
        self._last: defaultdict[str, float] = defaultdict(float)

    def __call__(self, event: Event) -> None:
        """Add up times.

        Args:
            event: any event of an engine.
        """
        if isinstance(event, PhaseEnd):
            self._running[f"time/{event.phase}"] += event.seconds
        elif isinstance(event, WaitEnd):
            self._running[f"wait/{event.what}"] += event.seconds
        elif isinstance(event, CollectiveEnd):
            self._running[f"wait/{wait_of(event.kind)}"] += event.seconds
        elif isinstance(event, StepEnd):
            self._last, self._running = self._running, defaultdict(float)

    def values(self, end: StepEnd) -> dict[str, Value]:
        """Return the times of a step.

        Args:
            end: the end of the step.

        Returns:
            Seconds by name.
        """
        phases = {f"time/{phase}": float(self._last[f"time/{phase}"]) for phase in PHASES}
        other = max(0.0, end.seconds - sum(phases.values()))
        waits = {f"wait/{wait}": float(self._last[f"wait/{wait}"]) for wait in WAITS}
        return {**phases, "time/other": other, **waits}
