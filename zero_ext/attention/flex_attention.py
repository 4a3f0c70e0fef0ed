"""Attention over a layout by torch's FlexAttention. Its tables are in blocks of 128 tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from zero_ext.attention.block_layout import BlockLayout

TILE = 128  # tokens; FlexAttention's kernels take no smaller blocks on every device
MOST_TILES = 1 << 27  # over all heads; FlexAttention's tables are dense, 8 to 24 bytes for each tile
# Biases up to this hide a key, as they do in the kernels: times log2(e) they are minus infinity.
_HIDES = torch.finfo(torch.float32).min / math.log2(math.e)

# A layout's masks, without and with causal. They hold nothing of the layout, so that it can be dropped.
_masks: WeakKeyDictionary[BlockLayout, dict[bool, BlockMask]] = WeakKeyDictionary()


class LayoutMask:
    """FlexAttention's `mask_mod` of a layout: whether a query may attend to a key.

    ``bits`` are those of :func:`tile_bits`, where one head serves all; ``block`` the tokens of the layout's
    blocks. Query i attends to keys up to i + ``shift``; None for all keys.
    """

    def __init__(self, bits: torch.Tensor, block: int, shift: int | None) -> None:
        self.bits, self.block, self.shift = bits, block, shift

    def __call__(
        self, batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        """Bool, of the indices' shape."""
        layout_head = head if self.bits.shape[0] > 1 else 0
        bit = query % TILE // self.block * (TILE // self.block) + key % TILE // self.block
        found = (self.bits[layout_head, query // TILE, key // TILE] >> bit) & 1 != 0
        return found if self.shift is None else found & (key <= query + self.shift)


class MaskedScores:
    """FlexAttention's `score_mod`: a bias is added, and keys that are padding are hidden."""

    def __init__(self, key_padding: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        self.key_padding, self.bias = key_padding, bias

    def __call__(
        self,
        score: torch.Tensor,
        batch: torch.Tensor,
        head: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
    ) -> torch.Tensor:
        """Return the score, of the same dtype."""
        if self.bias is not None:
            added = self.bias[batch, head, query, key].to(score.dtype)
            score = torch.where(added > _HIDES, score + added, float("-inf"))
        if self.key_padding is not None:
            score = torch.where(self.key_padding[batch, key], score, float("-inf"))
        return score


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: BlockLayout,
    *,
    causal: bool,
    scale: float | None,
    key_padding: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Attend by FlexAttention, compiled by torch on every device but the CPU.

    On the CPU torch computes all scores and has no backward. The arguments and the result are those of
    :func:`zero_ext.ops.block_sparse_attention`, with the layout on the device of the query. ``ValueError`` if
    the bias wants a gradient, or the layout has too many tiles.
    """
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            'bias: expected one without a gradient for backend "flex", got one that requires it. '
            'Detach it or use backend "kernel".'
        )
    batch, heads, queries, _ = query.shape
    scores = None
    if key_padding is not None or bias is not None:
        wide = None if bias is None else bias.expand(batch, heads, queries, key.shape[2])
        scores = MaskedScores(key_padding, wide)
    # Within a graph that is being compiled, and on the CPU, it is called as it is.
    plain = query.is_cpu or torch.compiler.is_compiling()
    function: Any = flex_attention if plain else _compiled()
    found: torch.Tensor = function(
        query,
        key,
        value,
        score_mod=scores,
        block_mask=block_mask(layout, causal),
        scale=scale,
        enable_gqa=key.shape[1] != heads,
    )
    return found


@cache
def _compiled() -> Callable[..., Any]:
    # A whole graph or an error: past its limit of recompilations torch would else compute all scores.
    return torch.compile(flex_attention, fullgraph=True)


@torch._dynamo.disable
@torch.inference_mode(False)
def block_mask(layout: BlockLayout, causal: bool) -> BlockMask:
    """Return the layout as FlexAttention takes it, on its device; made at the first call and kept with the
    layout. ``ValueError`` for more than `MOST_TILES` tiles."""
    made = _masks.setdefault(layout, {})
    if causal not in made:
        bits = tile_bits(layout)
        shift = layout.key_length - layout.query_length if causal else None
        some = bits != 0
        full = bits == (-1 if layout.block == 16 else (1 << (TILE // layout.block) ** 2) - 1)
        if shift is not None:
            rows = torch.arange(bits.shape[1], device=bits.device)[:, None] * TILE
            columns = torch.arange(bits.shape[2], device=bits.device) * TILE
            some = some & (columns <= rows + TILE - 1 + shift)
            full = full & (columns + TILE - 1 <= rows + shift)
        made[causal] = BlockMask.from_kv_blocks(
            *_ordered(some & ~full),
            *_ordered(full),
            BLOCK_SIZE=TILE,
            mask_mod=LayoutMask(bits, layout.block, shift),
            seq_lengths=(layout.query_length, layout.key_length),
        )
    return made[causal]


def tile_bits(layout: BlockLayout) -> torch.Tensor:
    """Return which blocks of each tile of 128 by 128 tokens a layout has, int64 [heads, query tiles, key
    tiles]: block (i, j) of a tile's n by n blocks is bit n * i + j."""
    each = TILE // layout.block
    rows, columns = check_tiles(layout)
    counts = layout.row_pointers.diff(dim=1).flatten()
    number = torch.arange(counts.numel(), device=layout.device).repeat_interleave(counts)
    head, row = number // layout.row_blocks, number % layout.row_blocks
    column = layout.columns.long()
    tile = (head * rows + row // each) * columns + column // each
    bit = torch.ones_like(column) << (row % each * each + column % each)
    bits = torch.zeros(layout.heads * rows * columns, dtype=torch.int64, device=layout.device)
    return bits.index_add_(0, tile, bit).view(layout.heads, rows, columns)


def check_tiles(layout: BlockLayout) -> tuple[int, int]:
    """Return how many rows and columns of tiles a layout has; ``ValueError`` for more than `MOST_TILES`."""
    each = TILE // layout.block
    rows, columns = -(-layout.row_blocks // each), -(-layout.column_blocks // each)
    if layout.heads * rows * columns > MOST_TILES:
        raise ValueError(
            f"layout: expected at most {MOST_TILES:,} tiles of {TILE} by {TILE} tokens over all heads for "
            f'backend "flex", got {layout.heads * rows * columns:,}. Use backend "kernel".'
        )
    return rows, columns


def _ordered(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many tiles each row has, int32 [1, heads, rows], and their columns first among all
    columns.
    """
    columns = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(dim=-1, dtype=torch.int32)[None], columns.to(torch.int32)[None]
