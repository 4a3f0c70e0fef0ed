"""Activation checkpointing inside and around blocks, reentrant and not: same result, two gathers a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import WIDTH, Block, feature_batch, feature_loss
from tests.zero.training import adamw, check_against_plain, configuration, gathered_once, sgd
from zero_ext.zero import engine_of


class InsideBlock(Block):
    """A block that checkpoints its own body."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, hidden, use_reentrant=self.reentrant)


class Checkpointed(nn.Module):
    """Blocks with checkpointing inside or around them; ``early`` is non-reentrant early stop."""

    def __init__(self, where: str, reentrant: bool, early: bool = True) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        made = InsideBlock(reentrant) if where == "inside" else Block()
        self.blocks = nn.ModuleList(
            [made, *(InsideBlock(reentrant) if where == "inside" else Block() for _ in "ab")]
        )
        self.where, self.reentrant, self.early = where, reentrant, early

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.entry(features)
        with set_checkpoint_early_stop(self.early):
            for block in self.blocks:
                if self.where == "around":
                    hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
                else:
                    hidden = block(hidden)
        return hidden


class Shared(nn.Module):
    """One block twice under reentrant checkpointing: its gradients come once a use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block()])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        for _ in range(2):
            hidden = checkpoint(self.blocks[0], hidden, use_reentrant=True)
        return hidden


@on_ranks(1, 2, 3)
def test_gradients_that_come_while_others_of_their_unit_are_reduced(world: World) -> None:
    units = {"bucket_elements": 150, "persistence_threshold": 0}
    for stage in (0, 1, 2, 3):
        torch.manual_seed(world.seed)
        check_against_plain(
            world, Shared(), feature_loss, feature_batch, stage, make_optimizer=sgd, units=units
        )


MODES = [("inside", True, True), ("inside", False, True), ("inside", False, False)]
MODES += [("around", True, True), ("around", False, True), ("around", False, False)]


@on_ranks(2)
@pytest.mark.parametrize("frozen", [False, True])
def test_all_kinds(world: World, frozen: bool) -> None:
    for where, reentrant, early in MODES:
        for stage in (1, 3):
            torch.manual_seed(world.seed)
            model = Checkpointed(where, reentrant, early)
            if frozen:
                for block in model.blocks:
                    block.up.requires_grad_(False)
            check_against_plain(world, model, feature_loss, feature_batch, stage)


@on_ranks(2)
def test_units_are_gathered_twice_a_step(world: World) -> None:
    for where, reentrant, early in MODES:
        model = Checkpointed(where, reentrant, early)
        model, optimizer = zero_ext.prepare(
            model, adamw(model.parameters()), configuration(3), process_group=world.group
        )
        engine = engine_of(model)
        for step in range(3):
            feature_loss(model, feature_batch(world.seed, step, 0, world.rank)).backward()
            assert engine.prefetcher.live_elements == 0
            optimizer.step()
            optimizer.zero_grad()
        padded = sum(unit.layout.numel for unit in engine.units)
        wanted = 2 * padded - gathered_once(engine)
        assert engine.traffic.last_elements["gather"] == wanted, (where, reentrant, early)
