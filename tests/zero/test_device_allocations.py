"""Steps leave the device's allocator alone: what passes through lies in memory that was there before."""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.test_accelerator import KINDS, SCHEDULES, combinations
from tests.zero.training import Plan, adamw, configuration
from zero_ext.zero import engine_of

WIDTH, LAYERS = 200, 4  # weights of 78 KiB in bf16; activations of two rows stay far below 64 KiB
DEVICE = "stand_in"


def deep_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(DEVICE)


def batch(world: World, step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(world.seed + 100 * step + world.rank)
    return torch.randn(2, WIDTH, generator=generator).to(DEVICE, dtype)


def large_allocations() -> int:
    return torch.accelerator.memory_stats()["allocation.large_pool.allocated"]


def torchs_own(world: World, dtype: torch.dtype, micro_batches: int) -> int:
    """Large allocations of a step that plain torch makes in forward and backward."""
    model = deep_model().to(dtype)
    before = large_allocations()
    for micro in range(micro_batches):
        model(batch(world, micro, dtype)).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None
    return large_allocations() - before


def check_steps(world: World, stage: int, offload: dict[str, Any], plan: Plan) -> None:
    dtype = torch.bfloat16 if plan.dtype == "bf16" else torch.float32
    wanted = torchs_own(world, dtype, plan.micro_batches)
    assert wanted >= LAYERS * plan.micro_batches  # the gradients of the weights
    with tempfile.TemporaryDirectory() as folder:
        paths = {"nvme_paths": [folder]} if "nvme" in offload.values() else {}
        config = configuration(stage, plan, offload={"staging_buffer_bytes": 1 << 20, **paths, **offload})
        model = deep_model()
        model, optimizer = zero_ext.prepare(
            model, adamw(model.parameters()), config, process_group=world.group
        )
        allocated = []
        for step in range(6):
            made = large_allocations()
            for micro in range(plan.micro_batches):
                model(batch(world, 10 * step + micro, dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.accelerator.synchronize()
            gc.collect()
            made = large_allocations() - made
            allocated.append(torch.accelerator.memory_allocated())
            assert step < 2 or made == wanted, (stage, offload, plan, step, made, wanted)
        assert len(set(allocated[1:])) == 1, (stage, offload, plan, allocated)
        assert engine_of(model).pool.overflow.total_bytes == 0


@on_ranks(1, 2, stand_in=True)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_steps_allocate_nothing_large(world: World, stage: int) -> None:
    plans = [
        Plan(dtype="bf16"),
        Plan(clip=0.1),
        Plan(micro_batches=2, accumulation="declared", dtype="bf16", clip=0.1),
    ]
    for number, offload in enumerate(combinations(stage)):
        if stage < 3 or number % 3 == world.seed % 3:
            torch.get_device_module(DEVICE).set_schedule(SCHEDULES[number % 4], world.seed)
            check_steps(world, stage, offload, plans[(number + world.seed // 3) % len(plans)])


@on_ranks(1, 2, stand_in=True)
@pytest.mark.parametrize("how", ["in_backward", "delayed"])
def test_updates_beside_the_passes_allocate_nothing_large(world: World, how: str) -> None:
    for tiers in ({"optimizer": "host"}, dict.fromkeys(KINDS, "host"), {"optimizer": "nvme"}):
        check_steps(world, 3, {**tiers, "update_mode": how}, Plan(dtype="bf16"))
