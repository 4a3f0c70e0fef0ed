"""The allocated bytes of a region of memory."""

from __future__ import annotations

from bisect import bisect

from zero_ext.config.buffer_sizes import extent_bytes


class ExtentArena:
    """Hands out extents of [0, capacity), whole pages of bytes each.

    The cost of both calls scales with the number of free ranges, not of extents. ``high_water`` is the end
    of the highest extent ever allocated.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._free = [(0, capacity)]  # begin and end, in order, none next to another
        self._sizes: dict[int, int] = {}  # of allocated extents, by offset
        self.high_water = 0

    def allocate(self, nbytes: int, preferred: range = range(0)) -> int | None:
        """Return the offset of a new extent of ``nbytes``, at least 1, or None if none is free.

        It is the first free one of ``preferred``, else in the smallest free range that is large enough.
        """
        size = extent_bytes(nbytes)
        offset = next((begin for begin in preferred if self._is_free(begin, begin + size)), None)
        if offset is None:
            offset = self._best(size)
        if offset is not None:
            self._cut(offset, offset + size)
            self._sizes[offset] = size
            self.high_water = max(self.high_water, offset + size)
        return offset

    def release(self, offset: int) -> None:
        """Free the extent at ``offset``; ``KeyError`` if none starts there."""
        if offset not in self._sizes:
            raise KeyError(f"offset: no extent starts at {offset}. Release each extent once, at its start.")
        begin, end = offset, offset + self._sizes.pop(offset)
        index = bisect(self._free, (begin, 0))
        if index < len(self._free) and self._free[index][0] == end:
            _, end = self._free.pop(index)
        if index and self._free[index - 1][1] == begin:
            index -= 1
            begin, _ = self._free.pop(index)
        self._free.insert(index, (begin, end))

    def _range_at(self, offset: int) -> int:
        """Return the number of the last free range that begins at ``offset`` or before it; -1 if there is
        none.
        """
        return bisect(self._free, (offset, self._capacity)) - 1

    def _is_free(self, begin: int, end: int) -> bool:
        index = self._range_at(begin)
        return index >= 0 and end <= self._free[index][1]

    def _cut(self, begin: int, end: int) -> None:
        index = self._range_at(begin)
        first, last = self._free.pop(index)
        rest = [(first, begin), (end, last)]
        self._free[index:index] = [each for each in rest if each[0] < each[1]]

    def _best(self, size: int) -> int | None:
        fitting = ((end - begin, begin) for begin, end in self._free if end - begin >= size)
        return min(fitting, default=(0, None))[1]
