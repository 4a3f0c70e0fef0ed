"""What is planned of each tier before anything is allocated is what the ledger tells after a step."""

from __future__ import annotations

import importlib
import itertools
from typing import Any
from unittest import mock

import pytest
import torch

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from zero_ext.zero import engine_of
from zero_ext.zero.construction.oom_report import MemoryEstimate

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "lamb": lambda parameters: zero_ext.Lamb(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
}
TIERS: list[dict[str, str]] = [
    {},
    {"optimizer": "host"},
    {"optimizer": "host", "grads": "host", "params": "host"},
]
CODES = {"quantized_weights": "int8", "quantized_gradients": "int4", "hierarchical_partition": True}


def compare(world: World, device: str, config: dict[str, Any], optimizer: str) -> None:
    """Prepares a model, makes a step, and compares the estimate and the memory breakdown."""
    made: list[MemoryEstimate] = []

    def make(*arguments: Any) -> MemoryEstimate:
        made.append(MemoryEstimate(*arguments))
        return made[-1]

    model = TinyModel(layers=2)
    module = importlib.import_module("zero_ext.zero.api.prepare")
    with mock.patch.object(module, "MemoryEstimate", make):
        model, prepared = zero_ext.prepare(
            model, OPTIMIZERS[optimizer](model.parameters()), config, process_group=world.group, device=device
        )
    for _ in range(2):
        language_loss(model, language_batch(world.seed, 0, 0, world.rank).to(device)).backward()
        prepared.step()
        prepared.zero_grad()
    (estimate,) = made
    held = estimate.bytes_by_tier()
    breakdown = engine_of(model).memory_by_tier()
    planned = {tier: {kind: held[tier][kind] for kind in breakdown[tier]} for tier in breakdown}
    assert planned == breakdown, (config, planned, breakdown)
    trained = [unit for unit in engine_of(model).units if any(each.requires_grad for each in unit.parameters)]
    most = before = 0
    for unit in reversed(trained):  # a unit's gradients live until the next one's first comes
        width, sizes = unit.layout.dtype.itemsize, [spec.numel for spec in unit.layout.specs]
        most = max(most, unit.layout.numel * width, before + max(sizes) * width)
        before = unit.layout.numel * width
    assert held["device"]["autograd's gradients"] == most
    assert held["device"]["NCCL's buffers (estimate)"] == 0  # no NCCL here
    if engine_of(model).world_size > 1:
        with (
            mock.patch.object(estimate, "device", torch.device("cuda")),
            mock.patch.object(estimate.collectives, "in_one_order", True),
        ):
            assert estimate.bytes_by_tier()["device"]["NCCL's buffers (estimate)"] >= 32 * (4 << 20)


def configs() -> list[dict[str, Any]]:
    """Every stage and tier that go together."""
    found = []
    for stage, tiers, dtype in itertools.product((0, 1, 2, 3), TIERS, ("keep", "bf16")):
        sharded = {"optimizer": stage >= 1, "grads": stage >= 2, "params": stage >= 3}
        if all(sharded[kind] for kind in tiers):
            found.append({"stage": stage, "offload": tiers, "precision": {"dtype": dtype}})
    return found


@on_ranks(1, 2)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_the_plan_is_what_is_held(world: World, optimizer: str) -> None:
    for config in configs():
        compare(world, "cpu", config, optimizer)


@on_ranks(2, 4)
def test_the_plan_is_what_is_held_of_compressed_communication(world: World) -> None:
    for communication in ({"ranks_per_node": 1, **CODES}, {"shard_group_size": 2}):
        config = {"stage": 3, "communication": communication, "precision": {"dtype": "bf16"}}
        compare(world, "cpu", config, "adamw")


@on_ranks(2, stand_in=True)
def test_the_plan_is_what_is_held_on_a_device(world: World) -> None:
    torch.stand_in.set_schedule("eager")  # type: ignore[attr-defined]
    for tiers in TIERS:
        compare(world, "stand_in:0", {"stage": 3, "offload": tiers, "precision": {"dtype": "bf16"}}, "adamw")
    for tiers in ({}, {"params": "host"}):
        config = {"stage": 3, "offload": tiers, "precision": {"dtype": "bf16"}}
        compare(world, "stand_in:0", {**config, "communication": {"ranks_per_node": 1, **CODES}}, "adamw")
    torch.stand_in.set_schedule("random")  # type: ignore[attr-defined]
