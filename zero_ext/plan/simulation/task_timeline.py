"""Tasks on resources that work on one task at a time, in the order in which they are handed over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class TaskSpan:
    """One task as it ran, times in seconds."""

    name: str
    resource: str
    begin: float
    end: float


class Timeline:
    """A schedule that grows task by task.

    A task begins when its resource has ended the one handed over before and all tasks that it comes after
    have ended, as on the streams of a device. All times are sums and maxima of durations, so a shorter
    task never makes anything later.
    """

    def __init__(self) -> None:
        self.spans: list[TaskSpan] = []
        self.busy: dict[str, float] = {}
        self._free: dict[str, float] = {}

    @property
    def end(self) -> float:
        """The time when the last task ends."""
        return max((span.end for span in self.spans), default=0.0)

    def add(self, name: str, resource: str, seconds: float, after: Iterable[int] = ()) -> int:
        """Hand a task over and return its number, by which later ones name it in ``after``."""
        begin = self._free.get(resource, 0.0)
        for number in after:
            begin = max(begin, self.spans[number].end)
        self.spans.append(TaskSpan(name, resource, begin, begin + seconds))
        self._free[resource] = begin + seconds
        self.busy[resource] = self.busy.get(resource, 0.0) + seconds
        return len(self.spans) - 1
