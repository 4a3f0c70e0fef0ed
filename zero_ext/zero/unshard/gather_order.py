"""The order in which units were needed, recorded once and used to look ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Generic, TypeVar

from zero_ext.zero.memory.gathered_unit import GatheredUnit

U = TypeVar("U", bound=GatheredUnit)


class GatherOrder(Generic[U]):
    """The units of one pass (forward or backward) in the order they were needed.

    The longest complete pass is the prediction, or a shorter one once two in turn were alike; a pass that
    departs from it costs time, never correctness: the cursor moves to the next place where the needed unit is
    expected, or stays. Where passes repeat (``repeats``: forwards without autograd, token after token) the
    last one is the prediction, and after its end comes its beginning. Of any other the pass ``then`` follows.
    """

    def __init__(self, then: GatherOrder[U] | None = None) -> None:
        self._recorded: list[U] = []
        self._trace: list[U] = []
        self._last: list[U] = []  # the pass before this one
        self._cursor = 0
        self._then = then
        self.repeats = False

    def begin(self, repeats: bool = False) -> None:
        """Start a pass; ``repeats`` if another one like it will follow."""
        self.repeats = repeats
        self._trace = []
        self._cursor = 0

    def needed(self, unit: U) -> list[U]:
        """Note that ``unit`` is needed now; the units that were expected before it."""
        self._trace.append(unit)
        for position in range(self._cursor, len(self._recorded)):
            if self._recorded[position] is unit:
                skipped, self._cursor = self._recorded[self._cursor : position], position + 1
                return skipped
        return []

    def finish(self) -> None:
        """End a pass: what was needed in it may be expected from now on."""
        trace, last, self._last = self._trace, self._last, self._trace
        # A block that is called by itself is no pass of the model.
        if len(trace) > 1 or not self._recorded:
            if self.repeats or trace == last or len(trace) > len(self._recorded):
                self._recorded = trace
            self._trace = []
            # Between passes nothing is expected, unless the order repeats.
            self._cursor = len(self._recorded)

    def expect(self, units: Iterable[U]) -> None:
        """Predict a pass that needs ``units`` in this order, before any was recorded."""
        self._recorded = list(units)

    def upcoming(self, beyond: bool = False) -> Iterator[U]:
        """Yield the units expected next, nearest first; each place of the order once.

        ``beyond``: also those of the pass that follows.
        """
        yield from islice(self._recorded, self._cursor, None)
        if self.repeats:
            yield from islice(self._recorded, self._cursor)
        elif beyond and self._then is not None:
            yield from self._then._recorded
