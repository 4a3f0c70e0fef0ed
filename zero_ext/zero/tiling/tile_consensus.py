"""Consensus of the ranks on the embedding tiles to gather, as each looks up different rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zero_ext.comm import Collectives
from zero_ext.zero.tiling.tiled_embedding import TiledEmbedding


class LookUpSum:
    """Sums the look-ups of each tile over the ranks, a collective. Its deep copy is None: a copied model runs
    on one rank."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __call__(self, counts: torch.Tensor) -> torch.Tensor:
        # The sum is made in place, and the caller still splits its ids by this rank's own counts.
        return self._collectives.sum_(counts.clone(), "look-ups in the tiles of an embedding")


def remove_tile_consensus(model: nn.Module) -> None:
    """Undo :func:`add_tile_consensus`."""
    for module in model.modules():
        if isinstance(module, TiledEmbedding):
            module.consensus = None


def add_tile_consensus(model: nn.Module, collectives: Collectives) -> None:
    """Make every tiled embedding of ``model`` gather what any rank looks up."""
    if collectives.world_size > 1:
        for module in model.modules():
            if isinstance(module, TiledEmbedding):
                module.consensus = LookUpSum(collectives)
