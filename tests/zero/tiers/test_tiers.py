"""Every tier of every state kind trains bit for bit as the device does, and moves what the formula says."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from typing import Any

import pytest
import torch

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import (
    Plan,
    Run,
    adamw,
    check_equal,
    configuration,
    gathered_once,
    sgd,
    train_prepared,
)

TIERS = {
    "optimizer": ("device", "host", "nvme"),
    "grads": ("device", "host", "nvme"),
    "params": ("device", "host", "nvme"),
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": sgd,
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "lion": lambda p: zero_ext.Lion(p, lr=1e-3, weight_decay=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}
RING = {"staging_buffer_bytes": 1 << 20}
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


def train(
    world: World, stage: int, plan: Plan, offload: dict[str, Any], make: Any = adamw, **more: Any
) -> Run:
    torch.manual_seed(world.seed)
    with tempfile.TemporaryDirectory() as folder:
        paths = {"nvme_paths": [folder]} if "nvme" in offload.values() else {}
        config = configuration(
            stage, plan, offload={**RING, **paths, **offload}, units={"bucket_elements": 700}, **more
        )
        return train_prepared(world, TinyModel(), language_loss, language_batch, config, plan, make)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_matrix(world: World, stage: int) -> None:
    choices = combinations(stage)[1:]
    for number, plan in enumerate(PLANS):
        reference = train(world, stage, plan, {})
        # On two ranks all under the first plan and half under the second; else each combination under one.
        stride = {0: 1, 1: 2}.get(number, len(PLANS)) if world.size == 2 else len(PLANS)
        for offload in choices[number % stride :: stride]:
            check_equal(train(world, stage, plan, offload), reference)


@on_ranks(1, 2)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_torchs_own_optimizers(world: World, name: str) -> None:
    reference = train(world, 3, PLANS[1], {}, OPTIMIZERS[name])
    for tiers in (
        {"optimizer": "host"},
        {"optimizer": "nvme", "grads": "host"},
        {"optimizer": "nvme", "params": "nvme"},
    ):
        check_equal(train(world, 3, PLANS[1], tiers, OPTIMIZERS[name]), reference)


@on_ranks(1, 2)
def test_lion_with_a_moment_in_bf16(world: World) -> None:
    bf16 = {"precision": {"dtype": "bf16", "moments_dtype": "bf16"}}
    plan, make = Plan(clip=0.1, dtype="bf16"), OPTIMIZERS["lion"]
    reference = train(world, 3, plan, {}, make, **bf16)
    for tiers in ({"optimizer": "host", "params": "host"}, {"optimizer": "nvme", "grads": "nvme"}):
        check_equal(train(world, 3, plan, tiers, make, **bf16), reference)


@on_ranks(1, 2)
def test_moments_in_8_bits(world: World) -> None:
    plan = Plan(dtype="bf16")
    quantized = {"precision": {"dtype": "bf16", "moments_dtype": "8bit"}}
    # Blocks are cut within units, which are other ones where the parameters are not sharded.
    for params in ({}, {"params": "nvme"}):
        reference = train(world, 3, plan, params, adamw, **quantized)
        for tier in ("host", "nvme"):
            run = train(world, 3, plan, {"optimizer": tier, **params}, adamw, **quantized)
            check_equal(run, reference)


@on_ranks(1, 2)
def test_bytes_of_a_step(world: World) -> None:
    """ZeRO-Offload, section 4: gradients go down and parameters come up once a step, in compute precision.
    ZeRO-Infinity, section 5.2: master weights and moments go from storage and back, 12 bytes a parameter."""
    plan = Plan(dtype="bf16")
    run = train(world, 2, plan, {"optimizer": "host", "grads": "host"})
    assert run.engine is not None
    elements = sum(unit.layout.shard_numel for unit in run.engine.units)
    moved = run.engine.tiers.transfers.last_moved
    assert moved == {("device", "host"): 2 * elements, ("host", "device"): 2 * elements}
    run = train(world, 2, plan, {"optimizer": "host"})
    assert run.engine is not None and run.engine.tiers.transfers.last_moved == moved
    run = train(world, 2, plan, {"optimizer": "nvme"})
    assert run.engine is not None
    stored = sum(round_up(12 * unit.layout.shard_numel, 4096) for unit in run.engine.units)
    assert run.engine.tiers.transfers.last_moved == {("nvme", "host"): stored, ("host", "nvme"): stored}
    run = train(world, 3, plan, {"optimizer": "nvme", "params": "nvme", "grads": "host"})
    assert run.engine is not None
    elements = sum(unit.layout.shard_numel for unit in run.engine.units)
    touched = [
        round_up(12 * unit.layout.shard_numel, 4096) if master.owned else 0
        for unit, master in zip(run.engine.units, run.engine.masters, strict=True)
    ]
    written = [
        2 * unit.layout.shard_numel * bool(size) for unit, size in zip(run.engine.units, touched, strict=True)
    ]
    gathered = 2 * elements - gathered_once(run.engine) // world.size
    assert run.engine.traffic.last_elements["gather"] == gathered * world.size
    wanted = {
        ("nvme", "device"): 2 * gathered,
        ("device", "host"): 2 * elements,
        ("nvme", "host"): sum(touched),
        ("host", "nvme"): sum(touched) + sum(written),
    }
    assert run.engine.tiers.transfers.last_moved == Counter(wanted)  # no entry is zero


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@on_ranks(1, 2)
def test_bytes_of_gradients_in_storage(world: World) -> None:
    """Each is written once and read by the step: in compute precision with one micro-batch, else in fp32, and
    then read and written once more for every further micro-batch. The norm costs no read."""
    for micro_batches, width in ((1, 2), (3, 4)):
        plan = Plan(micro_batches=micro_batches, dtype="bf16", clip=0.1)
        for optimizer in ("device", "host", "nvme"):
            run = train(world, 2, plan, {"grads": "nvme", "optimizer": optimizer})
            assert run.engine is not None
            shards = [unit.layout.shard_numel for unit in run.engine.units]
            stored = sum(round_up(width * numel, 4096) for numel in shards)
            wanted: Counter[Any] = Counter()
            wanted["device", "nvme"] = stored * micro_batches
            wanted["nvme", "device"] = stored * (micro_batches - 1)
            wanted["nvme", "device" if optimizer == "device" else "host"] += stored
            if optimizer == "host":
                wanted["host", "device"] = 2 * sum(shards)
            if optimizer == "nvme":
                state = sum(round_up(12 * numel, 4096) for numel in shards)
                wanted["nvme", "host"] += state
                wanted["host", "nvme"] += state
            assert run.engine.tiers.transfers.last_moved == +wanted
            assert run.engine.memory_breakdown()["grads"] == 0
            assert run.engine.pool.live_bytes == 0
