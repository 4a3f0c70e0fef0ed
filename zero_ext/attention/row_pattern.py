"""Rows of blocks as a band, shared global columns and random columns; written out as compressed rows.

Nothing here is larger than the blocks that there are: rows are described by two ends each and written out a
bounded number of blocks at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zero_ext.attention.block_layout import MOST_BLOCKS
from zero_ext.attention.random_blocks import Integers

_BLOCKS_AT_ONCE = 1 << 20

Compressed = npt.NDArray[np.int32]


@dataclass(frozen=True)
class RowPattern:
    """The blocks of some rows: columns `low` to `high`, global columns below `limit`, random ones below it.

    Attributes:
        low, high, limit: of each row, [rows].
        global_columns: ascending, without repeats.
        random: [rows, count], -1 for none; repeats of what the row has anyway are dropped.
    """

    low: Integers
    high: Integers
    limit: Integers
    global_columns: Integers
    random: Integers | None = None

    def of_rows(self, rows: slice) -> RowPattern:
        """Return the pattern of some of the rows."""
        random = None if self.random is None else self.random[rows]
        return RowPattern(self.low[rows], self.high[rows], self.limit[rows], self.global_columns, random)


def compressed_rows(pattern: RowPattern) -> tuple[Integers, Compressed]:
    """Row pointers [rows + 1] and ascending columns. Raises ValueError beyond 2**31 - 1 blocks."""
    first, resume, last = _global_ranges(pattern)
    counts = first + (pattern.high - pattern.low) + (last - resume)
    most = int(counts.sum()) + (0 if pattern.random is None else pattern.random.size)
    if most > MOST_BLOCKS:
        raise ValueError(
            f"layout: expected at most {MOST_BLOCKS:,} blocks per head, got {most:,}. Use larger blocks, "
            "or fewer of them."
        )
    if pattern.random is not None:
        chunks = [_with_random(pattern.of_rows(rows)) for rows in _portions(counts)]
        sizes = np.concatenate([size for size, _ in chunks])
        return _pointers(sizes), np.concatenate([columns for _, columns in chunks])
    columns = np.empty(most, dtype=np.int32)
    pointers = _pointers(counts)
    for rows in _portions(counts):
        columns[pointers[rows.start] : pointers[rows.stop]] = _columns(pattern.of_rows(rows))
    return pointers, columns


def _pointers(counts: Integers) -> Integers:
    pointers = np.zeros(counts.shape[0] + 1, dtype=np.int64)
    np.cumsum(counts, out=pointers[1:])
    return pointers


def _portions(counts: Integers) -> Iterator[slice]:
    """Return runs of rows with a bounded number of blocks, or of one row."""
    ends = np.cumsum(counts)
    start = 0
    while start < counts.shape[0]:
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _BLOCKS_AT_ONCE, side="right")))
        yield slice(start, stop)
        start = stop


def _global_ranges(pattern: RowPattern) -> tuple[Integers, Integers, Integers]:
    """Return per row the global columns before the band, before its end, and below the limit."""
    first = np.searchsorted(pattern.global_columns, pattern.low)
    resume = np.searchsorted(pattern.global_columns, pattern.high)
    last = np.searchsorted(pattern.global_columns, pattern.limit)
    return first, resume, np.maximum(resume, last)


def _columns(pattern: RowPattern) -> Compressed:
    """Return the columns of all rows, one row after the other: global ones, the band, global ones."""
    first, resume, last = _global_ranges(pattern)
    widths = np.stack((first, pattern.high - pattern.low, last - resume), axis=1)
    starts = np.stack((np.zeros_like(first), pattern.low, resume), axis=1)
    values = _ragged_ranges(starts.ravel(), widths.ravel())
    is_global = np.tile(np.array([True, False, True]), first.shape[0])
    chosen = np.repeat(is_global, widths.ravel())
    values[chosen] = pattern.global_columns.astype(np.int32)[values[chosen]]
    return values


def _ragged_ranges(starts: Integers, widths: Integers) -> Compressed:
    """`start`, `start` + 1, … of each width, one range after the other."""
    offsets = np.cumsum(widths) - widths
    ranges = np.repeat((starts - offsets).astype(np.int32), widths)
    ranges += np.arange(ranges.shape[0], dtype=np.int32)
    return ranges


def _with_random(pattern: RowPattern) -> tuple[Integers, Compressed]:
    """Count and columns of rows that have random columns too."""
    rows = pattern.low.shape[0]
    random = pattern.random if pattern.random is not None else np.empty((rows, 0), dtype=np.int64)
    first, resume, last = _global_ranges(pattern)
    counts = first + (pattern.high - pattern.low) + (last - resume)
    valid = (random >= 0) & (random < pattern.limit[:, None])
    height = 1 + int(max(pattern.limit.max(initial=0), pattern.high.max(initial=0)))
    keys = np.concatenate(
        (
            np.repeat(np.arange(rows) * height, counts) + _columns(pattern),
            (np.arange(rows)[:, None] * height + random)[valid],
        )
    )
    keys.sort()
    found = keys[np.concatenate(([True], keys[1:] != keys[:-1]))]
    return np.bincount(found // height, minlength=rows), (found % height).astype(np.int32)
