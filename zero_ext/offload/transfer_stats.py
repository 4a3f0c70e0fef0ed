"""Counts what moves between tiers, by source and target."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from zero_ext.config import Tier

Route = tuple[Tier, Tier]  # from, to


@dataclass
class TransferStats:
    """Bytes this rank moved between tiers since :meth:`begin_step`, and in the last finished step.

    A byte counts once for every copy that an accelerator would need; memory that is used in place
    counts nothing. Storage counts what was asked of it, padding to its blocks included. Threads may record
    simultaneously.
    """

    moved: Counter[Route] = field(default_factory=Counter)
    last_moved: Counter[Route] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def record(self, source: Tier, target: Tier, nbytes: int) -> None:
        """Add one copy of ``nbytes`` bytes; none if both tiers are the same."""
        if source != target and nbytes:
            with self._lock:
                self.moved[source, target] += nbytes

    def begin_step(self) -> None:
        """Close the current step: its counts become ``last_moved`` and the running ones start at zero."""
        with self._lock:
            self.last_moved, self.moved = self.moved, Counter()

    def clear(self) -> None:
        """Drop the counts: setting a model up belongs to no step."""
        self.moved.clear()
