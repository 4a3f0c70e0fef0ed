"""Every tier of every state kind trains bit for bit as the device does, and moves what the formula says."""

from __future__ import annotations

import itertools
import tempfile
from typing import Any

import pytest
import torch

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import Plan, Run, adamw, check_equal, configuration, sgd, train_prepared

TIERS = {
    "optimizer": ("device", "host", "nvme"),
    "grads": ("device", "host"),
    "params": ("device", "host", "nvme"),
}
RING = {"ring_bytes": 1 << 20}
PLANS = [
    Plan(),
    Plan(clip=0.1, dtype="bf16"),
    Plan(micro_batches=2, accumulation="declared", clip=0.1, dtype="bf16"),
    Plan(micro_batches=3, accumulation="undeclared"),
    Plan(micro_batches=2, accumulation="no_sync"),
]


def combinations(stage: int) -> list[dict[str, str]]:
    """Every choice of tiers that ``stage`` allows."""
    kinds = ("optimizer", "grads", "params")[: stage if stage else 0]
    choices = itertools.product(*(TIERS[kind] for kind in kinds))
    return [dict(zip(kinds, tiers, strict=True)) for tiers in choices]


def train(world: World, stage: int, plan: Plan, offload: dict[str, Any], make: Any = adamw) -> Run:
    torch.manual_seed(world.seed)
    with tempfile.TemporaryDirectory() as folder:
        paths = {"nvme_paths": [folder]} if "nvme" in offload.values() else {}
        config = configuration(
            stage, plan, offload={**RING, **paths, **offload}, units={"bucket_elements": 700}
        )
        return train_prepared(world, TinyModel(), language_loss, language_batch, config, plan, make)


@on_ranks(1, 2, 3, timeout=120)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_matrix(world: World, stage: int) -> None:
    for plan in PLANS:
        reference = train(world, stage, plan, {})
        for offload in combinations(stage)[1:]:
            check_equal(train(world, stage, plan, offload), reference)


@on_ranks(2)
def test_torchs_own_optimizers(world: World) -> None:
    for plan in PLANS[:2]:
        reference = train(world, 3, plan, {}, sgd)
        for offload in combinations(3)[1:]:
            check_equal(train(world, 3, plan, offload, sgd), reference)


@on_ranks(1, 2)
def test_bytes_of_a_step(world: World) -> None:
    """ZeRO-Offload, section 4: gradients go down and parameters come up once a step, in compute precision."""
    run = train(world, 2, Plan(dtype="bf16"), {"optimizer": "host", "grads": "host"})
    assert run.engine is not None
    elements = sum(unit.layout.shard_numel for unit in run.engine.units)
    moved = run.engine.tiers.transfers.last_moved
    assert moved == {("device", "host"): 2 * elements, ("host", "device"): 2 * elements}
    run = train(world, 2, Plan(dtype="bf16"), {"optimizer": "host"})
    assert run.engine is not None and run.engine.tiers.transfers.last_moved == moved
