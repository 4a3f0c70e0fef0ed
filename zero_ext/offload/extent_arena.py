"""Which bytes of a region of memory are taken."""

from __future__ import annotations

from bisect import bisect

from zero_ext.config.buffer_sizes import extent_bytes


class ExtentArena:
    """Hands out extents of [0, capacity), whole pages of bytes each.

    Both ways cost as much as there are free ranges, however many extents are taken. ``high_water`` is the end
    of the highest extent ever taken.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._free = [(0, capacity)]  # begin and end, in order, none next to another
        self._sizes: dict[int, int] = {}  # of what is taken, by offset
        self.high_water = 0

    def take(self, nbytes: int, places: range = range(0)) -> int | None:
        """The offset of a new extent of ``nbytes``, at least 1: the first free one of ``places``, else in the
        smallest free range that is large enough; None if there is none."""
        size = extent_bytes(nbytes)
        offset = next((place for place in places if self._is_free(place, place + size)), None)
        if offset is None:
            offset = self._best(size)
        if offset is not None:
            self._cut(offset, offset + size)
            self._sizes[offset] = size
            self.high_water = max(self.high_water, offset + size)
        return offset

    def give(self, offset: int) -> None:
        """Frees the extent at ``offset``; ``KeyError`` if none starts there."""
        if offset not in self._sizes:
            raise KeyError(f"no extent starts at {offset}")
        begin, end = offset, offset + self._sizes.pop(offset)
        place = bisect(self._free, (begin, 0))
        if place < len(self._free) and self._free[place][0] == end:
            _, end = self._free.pop(place)
        if place and self._free[place - 1][1] == begin:
            place -= 1
            begin, _ = self._free.pop(place)
        self._free.insert(place, (begin, end))

    def _range_at(self, offset: int) -> int:
        """The number of the last free range that begins at ``offset`` or before it; -1 if there is none."""
        return bisect(self._free, (offset, self._capacity)) - 1

    def _is_free(self, begin: int, end: int) -> bool:
        place = self._range_at(begin)
        return place >= 0 and end <= self._free[place][1]

    def _cut(self, begin: int, end: int) -> None:
        place = self._range_at(begin)
        first, last = self._free.pop(place)
        rest = [(first, begin), (end, last)]
        self._free[place:place] = [each for each in rest if each[0] < each[1]]

    def _best(self, size: int) -> int | None:
        fitting = ((end - begin, begin) for begin, end in self._free if end - begin >= size)
        return min(fitting, default=(0, None))[1]
