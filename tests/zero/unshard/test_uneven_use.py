"""Ranks that use different parameters of the same blocks: as one process, and none waits for another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import WIDTH, feature_batch
from tests.zero.training import adamw, check_near, prepared

BLOCKS = 10


class Moody(nn.Module):
    """A layer, and one that is used only if it is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, features: torch.Tensor, wanted: bool) -> torch.Tensor:
        hidden = torch.tanh(self.always(features))
        return features + (self.sometimes(hidden) if wanted else hidden)


class Deep(nn.Module):
    """More blocks than reductions may be in flight; ``checkpointed`` runs them again in backward."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Moody() for _ in range(BLOCKS))
        self.checkpointed = checkpointed

    def forward(self, features: torch.Tensor, wanted: list[bool]) -> torch.Tensor:
        for block, each in zip(self.blocks, wanted, strict=True):
            if self.checkpointed:
                features = checkpoint(block, features, each, use_reentrant=False)
            else:
                features = block(features, each)
        return features


def wanted_by(rank: int, step: int) -> list[bool]:
    """Rank 0 uses everything; others leave parts unused, late in the model at first."""
    generator = torch.Generator().manual_seed(step)
    retained = torch.rand(8, BLOCKS, generator=generator)[rank] < 0.5
    retained[BLOCKS - 2] = False
    return [rank == 0 or bool(each) for each in retained]


@on_ranks(2, 3)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "more", [{}, {"offload": {"update_mode": "in_backward"}}], ids=["after", "in_backward"]
)
def test_missing_gradients_count_as_zero(world: World, checkpointed: bool, more: dict[str, Any]) -> None:
    torch.manual_seed(world.seed)
    model = Deep(checkpointed)
    twin = copy.deepcopy(model)
    plain = adamw(twin.parameters())
    model, optimizer = prepared(world, model, **more)
    for step in range(3):
        features = feature_batch(world.seed, step, 0, world.rank).requires_grad_()
        model(features, wanted_by(world.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(world.size):
            features = feature_batch(world.seed, step, 0, rank)
            (twin(features, wanted_by(rank, step)).square().mean() / world.size).backward()
        plain.step()
        plain.zero_grad()
    check_near(model, twin, 1e-5, 1e-6)
