"""Which bytes of a region of memory are taken."""

from __future__ import annotations

from bisect import bisect, insort
from itertools import pairwise

from zero_ext.config.rooms import extent_bytes


class ExtentArena:
    """Hands out extents of [0, capacity), whole pages of bytes each.

    ``high_water`` is the end of the highest extent ever taken.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._taken: list[tuple[int, int]] = []  # begin and end, in order
        self.high_water = 0

    def take(self, nbytes: int, places: range = range(0)) -> int | None:
        """The offset of a new extent of ``nbytes``, at least 1: the first free one of ``places``, else in the
        smallest free range that is large enough; None if there is none."""
        size = extent_bytes(nbytes)
        free = (place for place in places if self._is_free(place, place + size))
        offset = next(free, None)
        if offset is None:
            offset = self._best(size)
        if offset is not None:
            insort(self._taken, (offset, offset + size))
            self.high_water = max(self.high_water, offset + size)
        return offset

    def give(self, offset: int) -> None:
        """Frees the extent at ``offset``; ``KeyError`` if none starts there."""
        place = bisect(self._taken, (offset, 0))
        if place == len(self._taken) or self._taken[place][0] != offset:
            raise KeyError(f"no extent starts at {offset}")
        del self._taken[place]

    def _is_free(self, begin: int, end: int) -> bool:
        place = bisect(self._taken, (begin, 0))
        before = self._taken[place - 1][1] if place else 0
        after = self._taken[place][0] if place < len(self._taken) else self._capacity
        return before <= begin and end <= after

    def _best(self, size: int) -> int | None:
        bounds = [(0, 0), *self._taken, (self._capacity, self._capacity)]
        gaps = [(after - before, before) for (_, before), (after, _) in pairwise(bounds)]
        return min((gap for gap in gaps if gap[0] >= size), default=(0, None))[1]
