"""The order in which units were needed, recorded once and used to look ahead."""

from __future__ import annotations

from collections.abc import Iterator

from zero_ext.zero.unit import Unit


class GatherOrder:
    """The units of one pass (forward or backward) in the order they were needed.

    The first complete pass is the prediction; a pass that departs from it costs time, never correctness:
    the cursor moves to the next place where the needed unit is expected, or stays.
    """

    def __init__(self) -> None:
        self._recorded: list[Unit] = []
        self._trace: list[Unit] = []
        self._cursor = 0

    def begin(self) -> None:
        """Starts a pass."""
        if len(self._trace) > len(self._recorded):
            self._recorded = self._trace
        self._trace = []
        self._cursor = 0

    def needed(self, unit: Unit) -> None:
        """Notes that ``unit`` is needed now."""
        self._trace.append(unit)
        for position in range(self._cursor, len(self._recorded)):
            if self._recorded[position] is unit:
                self._cursor = position + 1
                return

    def upcoming(self) -> Iterator[Unit]:
        """The units expected next, nearest first."""
        return iter(self._recorded[self._cursor :])
