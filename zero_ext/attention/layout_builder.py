"""Layouts by policy: the rows of every mode as bands, global and random columns; a cache of those built."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import _disable_current_modes

from zero_ext.attention.block_layout import MOST_BLOCKS, BlockLayout
from zero_ext.config.sparse_attention import SparseAttentionConfig

Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_BLOCKS_AT_ONCE = 1 << 20
Compressed = npt.NDArray[np.int32]
MOST_TOKENS = 1 << 30  # what the kernels take


@dataclass(frozen=True)
class _RowPattern:
    """The blocks of some rows: columns `low` to `high`, global columns below `limit`, random ones below it.

    `low`, `high` and `limit` are of each row, [rows]; `global_columns` ascending, without repeats; `random`
    [rows, count], -1 for none, repeats of what the row has anyway are dropped.
    """

    low: Integers
    high: Integers
    limit: Integers
    global_columns: Integers
    random: Integers | None = None

    def of_rows(self, rows: slice) -> _RowPattern:
        """Return the pattern of some of the rows."""
        random = None if self.random is None else self.random[rows]
        return _RowPattern(self.low[rows], self.high[rows], self.limit[rows], self.global_columns, random)


@torch._dynamo.disable
@torch.inference_mode(False)
def build_layout(
    policy: SparseAttentionConfig,
    heads: int,
    length: int,
    *,
    queries: int | None = None,
    causal: bool = False,
) -> BlockLayout:
    """Build the layout of `length` tokens that attend to each other, in time and memory of its blocks.

    Args:
        policy: the mode and its settings.
        heads: query heads; the layout holds 1 for all of them where they are alike.
        length: tokens; the last block may be shorter.
        queries: only the rows of blocks in which the last `queries` tokens lie; the layout's query length
            then is from the start of the first of these rows. None for all.
        causal: leave out the blocks above the diagonal of a bidirectional policy too.

    Returns:
        The layout, on the CPU.

    Raises:
        ValueError: `heads`, `length` or `queries` are out of range, or there are 2**31 blocks or more.

    Examples:
        >>> from zero_ext.attention import build_layout
        >>> from zero_ext.config import SparseAttentionConfig
        >>> layout = build_layout(SparseAttentionConfig(mode="fixed", block=16), heads=4, length=256)
        >>> layout.row_blocks, layout.column_blocks
        (16, 16)
    """
    _check("heads", heads, MOST_BLOCKS)
    _check("length", length, MOST_TOKENS)
    columns = -(-length // policy.block)
    first = 0
    if queries is not None:
        _check("queries", queries, length)
        first = (length - queries) // policy.block
    rows = np.arange(first, columns, dtype=np.int64)
    causal = causal or policy.unidirectional
    layouts = policy.layout_heads(heads)
    compressed = [
        _compressed_rows(_bounded(_pattern(policy, head, rows, columns), rows, columns, causal))
        for head in range(layouts)
    ]
    starts = np.cumsum([0, *(found.shape[0] for _, found in compressed)])
    if starts[-1] > MOST_BLOCKS:
        raise ValueError(
            f"layout: expected at most {MOST_BLOCKS:,} blocks, got {int(starts[-1]):,} over {layouts} heads. "
            "Use larger blocks, fewer of them, or different_layout_per_head false."
        )
    pointers = np.stack([own + start for (own, _), start in zip(compressed, starts[:-1], strict=True)])
    found = compressed[0][1] if layouts == 1 else np.concatenate([own for _, own in compressed])
    return BlockLayout(
        block=policy.block,
        heads=layouts,
        query_length=length - first * policy.block,
        key_length=length,
        row_pointers=torch.from_numpy(pointers.astype(np.int32)),
        columns=torch.from_numpy(found),
    )


class LayoutCache:
    """The layouts of one policy that were used last, by length, heads, direction and device.

    Threads may share one: two that ask for the same layout simultaneously may both build it.

    Args:
        policy: what layouts are built by.
        capacity: layouts cached; the least recently used one is evicted.
    """

    def __init__(self, policy: SparseAttentionConfig, capacity: int = 8) -> None:
        self.policy = policy
        self._capacity = capacity
        self._built: OrderedDict[tuple[object, ...], BlockLayout] = OrderedDict()

    def get(
        self,
        heads: int,
        length: int,
        *,
        queries: int | None = None,
        causal: bool = False,
        device: torch.device | str = "cpu",
    ) -> BlockLayout:
        """Return the layout that `build_layout` builds, on `device`; it is built at the first call.

        Under a FakeTensorMode too it is of real tensors, since it serves later calls.

        Args:
            heads: as for `build_layout`.
            length: as for `build_layout`.
            queries: as for `build_layout`.
            causal: as for `build_layout`.
            device: of the layout's tensors.

        Returns:
            The layout.
        """
        first = 0 if queries is None else (length - queries) // self.policy.block
        causal = causal or self.policy.unidirectional
        key = (self.policy.layout_heads(heads), length, first, causal, torch.device(device))
        layout = self._built.get(key)
        if layout is None:
            layout = self._built[key] = self._build(heads, length, queries, causal, device)
        # A lock would break compiled graphs. Each of these calls is atomic, and what another thread has
        # dropped since the look-up need not be kept.
        try:
            self._built.move_to_end(key)
            while len(self._built) > self._capacity:
                self._built.popitem(last=False)
        except KeyError:
            pass
        return layout

    @torch._dynamo.disable
    def _build(
        self, heads: int, length: int, queries: int | None, causal: bool, device: torch.device | str
    ) -> BlockLayout:
        with _disable_current_modes():  # those that make tensors fake or record what is done with them
            return build_layout(self.policy, heads, length, queries=queries, causal=causal).to(device)


def _check(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ValueError(f"{name}: expected 1 to {most:,}, got {value}. Pass a number in this range.")


def _bounded(pattern: _RowPattern, rows: Integers, columns: int, causal: bool) -> _RowPattern:
    """Cut off at the last column, and at the diagonal where no token attends to later ones."""
    limit = np.minimum(columns, rows + 1) if causal else np.full_like(rows, columns)
    low, high = np.maximum(pattern.low, 0), np.minimum(pattern.high, limit)
    inside = (pattern.global_columns >= 0) & (pattern.global_columns < columns)
    return _RowPattern(low, high, limit, np.unique(pattern.global_columns[inside]), pattern.random)


def _pattern(policy: SparseAttentionConfig, head: int, rows: Integers, columns: int) -> _RowPattern:
    """Return the blocks of `rows`, not yet cut off at the sequence's end nor at the diagonal."""
    none = np.empty(0, dtype=np.int64)
    if policy.mode == "dense":
        return _RowPattern(np.zeros_like(rows), np.full_like(rows, columns), rows, none)
    if policy.mode == "fixed":
        low = rows - rows % policy.num_local_blocks
        high = np.minimum(low + policy.num_local_blocks, columns)
        found = _fixed_globals(policy, head, columns)
        return _across(low, high, rows, found, columns, policy.horizontal_global_attention)
    if policy.mode == "variable":
        low, high = _windows(policy.local_window_blocks, rows, columns)
        found = _indexed_globals(policy, columns)
        pattern = _across(low, high, rows, found, columns, policy.horizontal_global_attention)
        return _randomly(policy, head, rows, columns, pattern)
    half = policy.num_sliding_window_blocks // 2
    low, high = rows - half, rows + half + 1
    if policy.mode == "local_sliding_window":
        return _RowPattern(low, high, rows, none)
    if policy.mode == "bslongformer":
        return _across(low, high, rows, _indexed_globals(policy, columns), columns, True)
    leading = np.arange(min(policy.num_global_blocks, columns), dtype=np.int64)
    return _randomly(policy, head, rows, columns, _across(low, high, rows, leading, columns, True))


def _across(
    low: Integers, high: Integers, rows: Integers, found: Integers, columns: int, horizontal: bool
) -> _RowPattern:
    """Return a band and global columns; rows of global blocks have all columns where `horizontal`."""
    if horizontal:
        full = np.isin(rows, found)
        low, high = np.where(full, 0, low), np.where(full, columns, high)
    return _RowPattern(low, high, rows, found)


def _fixed_globals(policy: SparseAttentionConfig, head: int, columns: int) -> Integers:
    """Return the global blocks of every window; those of a last, shorter one end with it at the latest.

    Unidirectional ones stay where a full window has them, so that no token's blocks depend on what follows.
    """
    size, width = policy.num_local_blocks, policy.num_global_blocks
    first = size - (1 + head % policy.num_different_global_patterns) * width
    full = columns - columns % size
    starts = np.arange(first, full, size, dtype=np.int64)
    if full < columns:
        last = full + first if policy.unidirectional else min(full + first, columns - width)
        starts = np.append(starts, max(0, min(last, columns)))
    found = np.unique(starts[:, None] + np.arange(min(width, columns), dtype=np.int64))
    return found[found < columns]


def _windows(sizes: tuple[int, ...], rows: Integers, columns: int) -> tuple[Integers, Integers]:
    """First block of each row's window, and the end of it."""
    ends = np.cumsum(np.minimum(sizes, columns))
    last = min(sizes[-1], columns)
    window = np.searchsorted(ends, rows, side="right")
    listed = np.minimum(window, ends.shape[0] - 1)
    beyond = (rows - ends[-1]) // last * last + ends[-1]
    low = np.where(window < ends.shape[0], np.concatenate(([0], ends))[listed], beyond)
    high = np.where(window < ends.shape[0], ends[listed], beyond + last)
    return low, np.minimum(high, columns)


def _indexed_globals(policy: SparseAttentionConfig, columns: int) -> Integers:
    ends = ((min(start, columns), min(end, columns)) for start, end in policy.global_ranges)
    ranges = [np.arange(*each, dtype=np.int64) for each in ends]
    return np.unique(np.concatenate([np.empty(0, dtype=np.int64), *ranges]))


def _randomly(
    policy: SparseAttentionConfig, head: int, rows: Integers, columns: int, pattern: _RowPattern
) -> _RowPattern:
    """`pattern` with the random columns of the policy, of all columns or of those up to the diagonal."""
    if policy.random_blocks == 0:
        return pattern
    available = rows + 1 if policy.unidirectional else np.full_like(rows, columns)
    count = min(policy.random_blocks, columns)
    if rows.shape[0] * count > MOST_BLOCKS:
        raise ValueError(
            f"num_random_blocks: expected at most {MOST_BLOCKS:,} blocks per head, got {count:,} random "
            f"blocks in each of {rows.shape[0]:,} rows. Lower num_random_blocks, or use larger blocks."
        )
    return replace(pattern, random=_random_columns(rows, available, count, policy.seed, head))


def _compressed_rows(pattern: _RowPattern) -> tuple[Integers, Compressed]:
    """Row pointers [rows + 1] and ascending columns. Raises ValueError beyond 2**31 - 1 blocks."""
    counts = _counts(pattern)
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


def _global_ranges(pattern: _RowPattern) -> tuple[Integers, Integers, Integers]:
    """Return per row the global columns before the band, before its end, and below the limit."""
    first = np.searchsorted(pattern.global_columns, pattern.low)
    resume = np.searchsorted(pattern.global_columns, pattern.high)
    last = np.searchsorted(pattern.global_columns, pattern.limit)
    return first, resume, np.maximum(resume, last)


def _counts(pattern: _RowPattern) -> Integers:
    """Return the blocks of each row without random ones."""
    first, resume, last = _global_ranges(pattern)
    return first + (pattern.high - pattern.low) + (last - resume)


def _columns(pattern: _RowPattern) -> Compressed:
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


def _with_random(pattern: _RowPattern) -> tuple[Integers, Compressed]:
    """Count and columns of rows that have random columns too."""
    rows, counts = pattern.low.shape[0], _counts(pattern)
    random = pattern.random if pattern.random is not None else np.empty((rows, 0), dtype=np.int64)
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


def _random_columns(rows: Integers, available: Integers, count: int, seed: int, head: int) -> Integers:
    """`count` distinct columns below `available` for each of `rows`, uniformly; -1 where there are fewer.

    Floyd's sampling (Bentley and Floyd, CACM 30(9), 1987), with SplitMix64 (Steele et al., OOPSLA 2014) as
    a counter-based generator: the columns of a row depend on its number, on `available` of it, on `seed` and
    on `head` alone. Shape [rows, count].
    """
    chosen = np.full((rows.shape[0], count), -1, dtype=np.int64)
    stream = _mixed(np.array([seed], dtype=np.uint64) + _GOLDEN * np.array([head + 1], dtype=np.uint64))
    key = _mixed(stream + _GOLDEN * (rows.astype(np.uint64) + np.uint64(1)))
    for draw in range(count):
        top = available - np.minimum(available, count) + draw  # the largest that this draw may give
        words = _mixed(key + _GOLDEN * np.array([draw + 1], dtype=np.uint64))
        drawn = _below(words, np.maximum(top, 0) + 1)
        repeated = (chosen[:, :draw] == drawn[:, None]).any(axis=1)
        chosen[:, draw] = np.where(top < available, np.where(repeated, top, drawn), -1)
    return chosen


def _mixed(state: Words) -> Words:
    for shift, factor in _MIX:
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    return state ^ (state >> np.uint64(31))


def _below(words: Words, bound: Integers) -> Integers:
    """Numbers below `bound` from the high 32 bits; their odds differ by at most one part in 2**32 / bound."""
    return (((words >> np.uint64(32)) * bound.astype(np.uint64)) >> np.uint64(32)).astype(np.int64)
