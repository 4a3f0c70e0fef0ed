"""Checkpointing in and around blocks, torch's and `checkpoint_activations`: same bits, two gathers a step."""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import WIDTH, Block, feature_batch, feature_loss
from tests.zero.training import (
    Plan,
    check_against_plain,
    check_equal,
    configuration,
    gathered_once,
    placed,
    prepared,
    sgd,
    train_prepared,
)
from zero_ext.config.events import ActivationEnd
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
        self.where, self.reentrant, self.early = where, reentrant, early
        self.blocks = nn.ModuleList(self.block() for _ in range(3))

    def block(self) -> Block:
        return InsideBlock(self.reentrant) if self.where == "inside" else Block()

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
    for mode in MODES:
        check_gathers(world, Checkpointed(*mode))


def check_gathers(world: World, model: nn.Module, **more: Any) -> list[Any]:
    """Units are gathered for forward and once more for backward; the events of three steps."""
    events: list[Any] = []
    model, optimizer = prepared(world, model, **more)
    engine = engine_of(model)
    engine.subscribe(events.append)
    for step in range(3):
        feature_loss(model, feature_batch(world.seed, step, 0, world.rank)).backward()
        assert engine.prefetcher.live_elements == 0
        optimizer.step()
        optimizer.zero_grad()
    padded = sum(unit.layout.numel for unit in engine.units)
    assert engine.traffic.last_elements["gather"] == 2 * padded - gathered_once(engine)
    return events


# -- checkpoint_activations: every stage and tier ---------------------------------------------------------


class CheckpointedBlocks(nn.Module):
    """Blocks that are checkpointed from outside, or inside by pairs, with dropout between them."""

    def __init__(self, run: bool, depth: int = 3) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(Block(), nn.Dropout(0.2)) for _ in range(depth))
        self.run = run

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.entry(features)
        for block in self.blocks:
            hidden = zero_ext.checkpoint_activations(block, hidden) if self.run else block(hidden)
        return hidden


def sections(folder: str) -> list[dict[str, Any]]:
    """Every way of keeping, with tensors of any size moved."""
    nvme = {"tier": "nvme", "nvme_paths": [folder], "buffer_bytes": 2**20, "min_offload_bytes": 0}
    host = {"tier": "host", "min_offload_bytes": 0}
    return [
        {},
        host,
        nvme,
        {"contiguous_memory_optimization": True, "number_checkpoints": 8},
        {"save_ops": ["aten.addmm"], **host},
        {"save_budget_bytes": 2000},
        {"mode": "offload_saved_tensors", **host},
        {"mode": "offload_saved_tensors", **nvme},
    ]


def trained(world: World, stage: int, plan: Plan, run: bool, section: dict[str, Any], **more: Any) -> Any:
    torch.manual_seed(world.seed)
    model = CheckpointedBlocks(run)
    config = configuration(stage, plan, activation_checkpointing=section, **more)
    result = train_prepared(world, model, feature_loss, feature_batch, config, plan)
    checkpointing = result.engine.checkpointing
    gc.collect()
    assert checkpointing.used_bytes() == 0
    if section.get("tier", "device") != "device":
        assert checkpointing.allocated_bytes()[section["tier"]] > 0
    return result


@on_ranks(1, 2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_same_bits_in_every_stage(world: World, dtype: str) -> None:
    plan = Plan(steps=2, micro_batches=2, clip=0.5, dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        for stage in (0, 2, 3):
            wanted = trained(world, stage, plan, False, {})
            for section in sections(folder) if stage == 3 else sections(folder)[1:3]:
                check_equal(trained(world, stage, plan, True, section), wanted)


@on_ranks(2)
def test_beside_offloaded_parameters_and_updates_inside_backward(world: World) -> None:
    tiers = {"params": "nvme", "optimizer": "nvme", "update_mode": "in_backward"}
    with placed(tiers) as offload, tempfile.TemporaryDirectory() as folder:
        wanted = trained(world, 3, Plan(), False, {}, offload=offload)
        for section in sections(folder)[:3]:
            check_equal(trained(world, 3, Plan(), True, section, offload=offload), wanted)


@on_ranks(2)
def test_units_are_gathered_twice_a_step_and_never_moved(world: World) -> None:
    for more in ({}, {"mode": "offload_saved_tensors"}):
        section = {"min_offload_bytes": 0, "profile": True, "tier": "host", **more}
        events = check_gathers(world, CheckpointedBlocks(True), activation_checkpointing=section)
        sizes = {each.bytes for each in events if isinstance(each, ActivationEnd) and each.what == "offload"}
        shapes = {3 * WIDTH, 3 * (2 * WIDTH + 1), 3}  # hidden, inner, and per row: no weights
        assert sizes and sizes <= {-(-n * 4 // 64) * 64 for n in shapes}


@on_ranks(1)
def test_inside_forward_only(world: World) -> None:
    config = configuration(3, activation_checkpointing={"tier": "host", "min_offload_bytes": 0})
    model, _ = zero_ext.prepare(CheckpointedBlocks(True), None, config, process_group=world.group)
    inner = zero_ext.activation.current_checkpointing
    seen = []
    model.module.blocks[0].register_forward_hook(lambda *_: seen.append(inner()))
    with torch.no_grad():
        model(feature_batch(world.seed, 0, 0, 0))
    assert seen == [engine_of(model).checkpointing] and inner() is not seen[0]

    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    model.module.blocks[1].register_forward_pre_hook(fails)
    with pytest.raises(ZeroDivisionError):
        model(feature_batch(world.seed, 0, 0, 0))
    assert inner() is not seen[0]
