"""Layouts by policy: the rows of every mode, and a cache of those built."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from zero_ext.attention.block_layout import MOST_BLOCKS, BlockLayout
from zero_ext.attention.random_blocks import Integers, random_columns
from zero_ext.attention.row_pattern import RowPattern, compressed_rows
from zero_ext.config.sparse_attention import SparseAttentionConfig

MOST_TOKENS = 1 << 30  # what the kernels take


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
        compressed_rows(_bounded(_pattern(policy, head, rows, columns), rows, columns, causal))
        for head in range(layouts)
    ]
    starts = np.cumsum([0, *(found.shape[0] for _, found in compressed)])
    if starts[-1] > MOST_BLOCKS:
        raise ValueError(
            f"layout: expected at most {MOST_BLOCKS:,} blocks, got {int(starts[-1]):,} over {layouts} heads. "
            "Use larger blocks, fewer of them, or different_layout_per_head false."
        )
    pointers = np.stack(
        [own_pointers + start for (own_pointers, _), start in zip(compressed, starts[:-1], strict=True)]
    )
    found = (
        compressed[0][1] if layouts == 1 else np.concatenate([own_columns for _, own_columns in compressed])
    )
    return BlockLayout(
        block=policy.block,
        heads=layouts,
        query_length=length - first * policy.block,
        key_length=length,
        row_pointers=torch.from_numpy(pointers.astype(np.int32)),
        columns=torch.from_numpy(found),
    )


def _check(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ValueError(f"{name}: expected 1 to {most:,}, got {value}. Pass a number in this range.")


def _bounded(pattern: RowPattern, rows: Integers, columns: int, causal: bool) -> RowPattern:
    """Cut off at the last column, and at the diagonal where no token attends to later ones."""
    limit = np.minimum(columns, rows + 1) if causal else np.full_like(rows, columns)
    low, high = np.maximum(pattern.low, 0), np.minimum(pattern.high, limit)
    inside = (pattern.global_columns >= 0) & (pattern.global_columns < columns)
    return RowPattern(low, high, limit, np.unique(pattern.global_columns[inside]), pattern.random)


def _pattern(policy: SparseAttentionConfig, head: int, rows: Integers, columns: int) -> RowPattern:
    """Return the blocks of `rows`, not yet cut off at the sequence's end nor at the diagonal."""
    none = np.empty(0, dtype=np.int64)
    if policy.mode == "dense":
        return RowPattern(np.zeros_like(rows), np.full_like(rows, columns), rows, none)
    if policy.mode == "fixed":
        low = rows - rows % policy.num_local_blocks
        high = np.minimum(low + policy.num_local_blocks, columns)
        found = _fixed_globals(policy, head, columns)
        return _across(low, high, rows, found, columns, policy.horizontal_global_attention)
    if policy.mode == "variable":
        low, high = _windows(policy.local_window_blocks, rows, columns)
        pattern = _across(
            low, high, rows, _indexed_globals(policy, columns), columns, policy.horizontal_global_attention
        )
        return _randomly(policy, head, rows, columns, pattern)
    half = policy.num_sliding_window_blocks // 2
    low, high = rows - half, rows + half + 1
    if policy.mode == "local_sliding_window":
        return RowPattern(low, high, rows, none)
    if policy.mode == "bslongformer":
        return _across(low, high, rows, _indexed_globals(policy, columns), columns, True)
    leading = np.arange(min(policy.num_global_blocks, columns), dtype=np.int64)
    return _randomly(policy, head, rows, columns, _across(low, high, rows, leading, columns, True))


def _across(
    low: Integers, high: Integers, rows: Integers, found: Integers, columns: int, horizontal: bool
) -> RowPattern:
    """Return a band and global columns; rows of global blocks have all columns where `horizontal`."""
    if horizontal:
        full = np.isin(rows, found)
        low, high = np.where(full, 0, low), np.where(full, columns, high)
    return RowPattern(low, high, rows, found)


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
    ranges = [
        np.arange(min(start, columns), min(end, columns), dtype=np.int64)
        for start, end in policy.global_ranges
    ]
    return np.unique(np.concatenate([np.empty(0, dtype=np.int64), *ranges]))


def _randomly(
    policy: SparseAttentionConfig, head: int, rows: Integers, columns: int, pattern: RowPattern
) -> RowPattern:
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
    found = random_columns(rows, available, count, policy.seed, head)
    return RowPattern(pattern.low, pattern.high, pattern.limit, pattern.global_columns, found)


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
