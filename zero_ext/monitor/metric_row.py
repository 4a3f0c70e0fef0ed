"""The values of one step, by name: what sources contribute to and writers write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from zero_ext.config.events import Event, StepEnd

Value = float | int | None | tuple[float, ...]
Row = Mapping[str, Value]


class Source(Protocol):
    """Receives every event of an engine and reports values of the step that ended last."""

    def __call__(self, event: Event) -> None:
        """Take an event."""

    def values(self, end: StepEnd) -> Row:
        """Values of the step that ``end`` reports, the same names for every step."""


class Writer(Protocol):
    """Writes rows somewhere, each whole when `write` returns."""

    def write(self, row: Row) -> None:
        """Write the values of a step; "step" is always among them. None means unknown."""

    def close(self) -> None:
        """End what is open."""


def facts_of(end: StepEnd) -> dict[str, Value]:
    """Return what a `StepEnd` itself says."""
    return {
        "step": end.step,
        "loss": end.loss,
        "grad_norm": end.grad_norm,
        "lr": end.lr,
        "skipped": int(end.skipped),
        "loss_scale": end.loss_scale,
        "seconds": end.seconds,
    }


def scalars(row: Row) -> dict[str, float]:
    """Return the known values but "step" as single numbers, as TensorBoard and W&B want them: ``lr`` of
    several param groups becomes ``lr/0``, ``lr/1`` and so on.
    """
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, tuple):
            several = len(value) > 1
            found.update({f"{name}/{index}" if several else name: one for index, one in enumerate(value)})
        elif value is not None and name != "step":
            found[name] = value
    return found
