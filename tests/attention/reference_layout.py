"""Layouts by asking every pair of blocks: slow, and from the meaning of the settings alone."""

from __future__ import annotations

import torch

from zero_ext.config.sparse_attention import SparseAttentionConfig


def reference_mask(policy: SparseAttentionConfig, head: int, blocks: int) -> torch.Tensor:
    """bool [blocks, blocks] of a policy without random blocks."""
    spots = _global_blocks(policy, head, blocks)
    mask = torch.zeros(blocks, blocks, dtype=torch.bool)
    for row in range(blocks):
        for column in range(blocks):
            future = policy.unidirectional and column > row
            mask[row, column] = not future and _attends(policy, spots, row, column)
    return mask


def _attends(policy: SparseAttentionConfig, spots: set[int], row: int, column: int) -> bool:
    if policy.mode == "dense" or column in spots:
        return True
    across = policy.mode in ("bigbird", "bslongformer") or policy.horizontal_global_attention
    if row in spots and across:
        return True
    if policy.mode in ("fixed", "variable"):
        return _window(policy, row) == _window(policy, column)
    return abs(row - column) <= policy.num_sliding_window_blocks // 2


def _window(policy: SparseAttentionConfig, block: int) -> int:
    sizes = (policy.num_local_blocks,) if policy.mode == "fixed" else policy.local_window_blocks
    number, end = 0, sizes[0]
    while block >= end:
        number += 1
        end += sizes[min(number, len(sizes) - 1)]
    return number


def _global_blocks(policy: SparseAttentionConfig, head: int, blocks: int) -> set[int]:
    if policy.mode == "bigbird":
        return set(range(policy.num_global_blocks))
    if policy.mode in ("variable", "bslongformer"):
        return {block for start, end in policy.global_ranges for block in range(start, end)}
    if policy.mode != "fixed":
        return set()
    size, width = policy.num_local_blocks, policy.num_global_blocks
    layout = head if policy.different_layout_per_head else 0
    first = size - (1 + layout % policy.num_different_global_patterns) * width
    found: set[int] = set()
    for window in range(0, blocks, size):
        start = window + first
        if window + size > blocks and not policy.unidirectional:  # the last window is shorter
            start = max(0, min(start, blocks - width))
        found |= set(range(start, min(start + width, blocks)))
    return found
