"""Every kind of collective of every step: how many, how many bytes, how long they were waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zero_ext.config.events import CollectiveEnd, Event, StepEnd
from zero_ext.monitor.writers.json_lines import JsonLines


@dataclass
class CommsTotals:
    """What collectives of one kind over a group of ``ranks`` add up to, in one step or in all.

    ``elements`` are those of the full buffers, ``bytes_sent`` this rank's, ``seconds`` those that the host
    waited.
    """

    kind: str
    ranks: int
    collectives: int = 0
    elements: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0

    def add(self, other: CommsTotals) -> None:
        """Adds another count of the same."""
        self.collectives += other.collectives
        self.elements += other.elements
        self.bytes_sent += other.bytes_sent
        self.seconds += other.seconds


class CommsLog:
    """Subscriber that writes, at the end of every step, a line of JSON for each kind of collective and group:
    step, kind, ranks, collectives, elements, bytes_sent, seconds. Use it on one rank or on each with a file
    of its own.

    ``totals`` holds the sums over all steps so far; ``table()`` is their text. Raises OSError where writing
    fails.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = JsonLines(path)
        self._step: dict[tuple[str, int], CommsTotals] = {}
        self._all: dict[tuple[str, int], CommsTotals] = {}

    @property
    def totals(self) -> Sequence[CommsTotals]:
        """Sums over all steps, by kind and group."""
        return tuple(self._all.values())

    def __call__(self, event: Event) -> None:
        """Counts a collective, or closes the step."""
        if isinstance(event, CollectiveEnd):
            one = CommsTotals(event.kind, event.ranks, 1, event.elements, event.bytes_sent, event.seconds)
            self._step.setdefault((one.kind, one.ranks), CommsTotals(one.kind, one.ranks)).add(one)
        elif isinstance(event, StepEnd):
            step, self._step = self._step, {}
            for key, counted in step.items():
                self._all.setdefault(key, CommsTotals(counted.kind, counted.ranks)).add(counted)
                self._file.write_object({"step": event.step, **vars(counted)})

    def table(self) -> str:
        """The totals, a line for each kind and group."""
        lines = [f"{'collective':<26}{'ranks':>6}{'count':>9}{'sent':>12}{'waited':>11}"]
        for each in self._all.values():
            lines.append(
                f"{each.kind:<26}{each.ranks:>6}{each.collectives:>9}"
                f"{each.bytes_sent / 2**20:>8.1f} MiB{each.seconds:>9.3f} s"
            )
        return "\n".join(lines)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
