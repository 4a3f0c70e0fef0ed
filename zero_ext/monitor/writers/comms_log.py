"""Every kind of collective of every step: how many, how many bytes, how long they were waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zero_ext.config.events import CollectiveEnd, Event, StepEnd
from zero_ext.monitor.writers.json_lines import JsonLines


@dataclass
class CommsTotals:
    """The sums of collectives of one kind over a group of ``ranks``, in one step or in all.

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
        """Add another count of the same."""
        self.collectives += other.collectives
        self.elements += other.elements
        self.bytes_sent += other.bytes_sent
        self.seconds += other.seconds


class CommsLog:
    """Write a line of JSON for each kind of collective and group at the end of every step.

    A subscriber: give it to [`subscribe`][zero_ext.monitor.subscribe]. A line has step, kind, ranks,
    collectives, elements, bytes_sent, seconds. Use it on one rank, or on each with a file of its own.

    Args:
        path: the file, which is continued if it exists.

    Raises:
        OSError: the file cannot be opened. Later calls raise it where writing fails.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = JsonLines(path)
        self._step: dict[tuple[str, int], CommsTotals] = {}
        self._all: dict[tuple[str, int], CommsTotals] = {}

    @property
    def totals(self) -> Sequence[CommsTotals]:
        """Sum over all steps so far, by kind and group."""
        return tuple(self._all.values())

    def __call__(self, event: Event) -> None:
        """Count a collective, or write the lines of a step.

        Args:
            event: any event of an engine.
        """
        if isinstance(event, CollectiveEnd):
            one = CommsTotals(event.kind, event.ranks, 1, event.elements, event.bytes_sent, event.seconds)
            self._step.setdefault((one.kind, one.ranks), CommsTotals(one.kind, one.ranks)).add(one)
        elif isinstance(event, StepEnd):
            step, self._step = self._step, {}
            for key, counted in step.items():
                self._all.setdefault(key, CommsTotals(counted.kind, counted.ranks)).add(counted)
                self._file.write_object({"step": event.step, **vars(counted)})

    def table(self) -> str:
        """Return the totals as text.

        Returns:
            A line for each kind and group, below a heading.
        """
        lines = [f"{'collective':<26}{'ranks':>6}{'count':>9}{'sent':>12}{'waited':>11}"]
        for each in self._all.values():
            lines.append(
                f"{each.kind:<26}{each.ranks:>6}{each.collectives:>9}"
                f"{each.bytes_sent / 2**20:>8.1f} MiB{each.seconds:>9.3f} s"
            )
        return "\n".join(lines)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
