"""Ranks look up different rows, and must gather the same tiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zero_ext.comm import Collectives
from zero_ext.zero.tiling.tiled_embedding import TiledEmbedding


class LookedUpAnywhere:
    """Sums the look-ups of each tile over the ranks, a collective. A deep copy of it is None: a copied model
    runs on its own."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __call__(self, counts: torch.Tensor) -> torch.Tensor:
        return self._collectives.sum_(counts.clone(), "look-ups in the tiles of an embedding")


def end_agreement(model: nn.Module) -> None:
    """The reverse of :func:`agree_on_tiles`."""
    for module in model.modules():
        if isinstance(module, TiledEmbedding):
            module.agreement = None


def agree_on_tiles(model: nn.Module, collectives: Collectives) -> None:
    """Makes every tiled embedding of ``model`` gather what any rank looks up."""
    if collectives.world_size > 1:
        for module in model.modules():
            if isinstance(module, TiledEmbedding):
                module.agreement = LookedUpAnywhere(collectives)
