"""Every tier of every state kind, or of a part of it, trains alike, and moves what the formula says."""

from __future__ import annotations

import itertools
import random
import tempfile
import warnings
from collections import Counter
from typing import Any

import pytest
import torch

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel
from tests.zero.training import (
    Plan,
    check_equal,
    gathered_once,
    language_steps,
    placed,
    prepared,
    sgd,
)
from tests.zero.training import train_in_tiers as train
from zero_ext.zero import Engine
from zero_ext.zero.construction.grouping import largest_within_ratio

TIERS, KINDS = ("device", "host", "nvme"), ("optimizer", "grads", "params")
OPTIMIZERS: dict[str, Any] = {
    "sgd": sgd,
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "lion": lambda p: zero_ext.Lion(p, lr=1e-3, weight_decay=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}
PLANS = [
    Plan(),
    Plan(clip=0.1, dtype="bf16"),
    Plan(micro_batches=2, accumulation="declared", clip=0.1, dtype="bf16"),
    Plan(micro_batches=3, accumulation="undeclared"),
    Plan(micro_batches=2, accumulation="no_sync"),
]


def combinations(stage: int) -> list[dict[str, str]]:
    """Every choice of tiers that ``stage`` allows."""
    kinds = KINDS[:stage]
    return [dict(zip(kinds, tiers, strict=True)) for tiers in itertools.product(TIERS, repeat=stage)]


@on_ranks(1, 2, 3, by_turns=True)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_matrix(world: World, stage: int) -> None:
    choices = combinations(stage)[1:]
    for number, plan in enumerate(PLANS):
        reference = train(world, stage, plan, {})
        # On two ranks all under the first plan and half under the second; else each combination under one.
        stride = {0: 1, 1: 2}.get(number, len(PLANS)) if world.size == 2 else len(PLANS)
        for offload in choices[number % stride :: stride]:
            check_equal(train(world, stage, plan, offload), reference)


@on_ranks(1, 2, by_turns=True)
@pytest.mark.parametrize("name", [*sorted(OPTIMIZERS), "lion, bf16 moment"])
def test_other_optimizers(world: World, name: str) -> None:
    name, _, narrow = name.partition(", ")
    more = {"precision": {"dtype": "bf16", "moments_dtype": "bf16"}} if narrow else {}
    reference = train(world, 3, PLANS[1], {}, OPTIMIZERS[name], **more)
    for tiers in (
        {"optimizer": "host"},
        {"optimizer": "nvme", "grads": "host"},
        {"optimizer": "nvme", "params": "nvme"},
    ):
        check_equal(train(world, 3, PLANS[1], tiers, OPTIMIZERS[name], **more), reference)


@on_ranks(1, 2)
def test_moments_in_8_bits(world: World) -> None:
    plan, quantized = Plan(dtype="bf16"), {"precision": {"dtype": "bf16", "moments_dtype": "8bit"}}
    # Blocks are cut within units, which are other ones where the parameters are not sharded.
    for params in ({}, {"params": "nvme"}):
        reference = train(world, 3, plan, params, **quantized)
        for tier in ("host", "nvme"):
            check_equal(train(world, 3, plan, {"optimizer": tier, **params}, **quantized), reference)


@on_ranks(1, 2)
def test_bytes_of_a_step(world: World) -> None:
    """ZeRO-Offload, section 4: gradients go down and parameters come up once a step, in compute precision.
    ZeRO-Infinity, section 5.2: master weights and moments go from storage and back, 12 bytes a parameter."""

    def trained(stage: int, **offload: str) -> tuple[Any, Counter[Any], list[int]]:
        engine = train(world, stage, Plan(dtype="bf16"), offload).engine
        assert engine is not None
        return engine, engine.tiers.transfers.last_moved, [unit.layout.shard_numel for unit in engine.units]

    for grads in ("host", "device"):
        _, moved, shards = trained(2, optimizer="host", grads=grads)
        assert moved == dict.fromkeys([("device", "host"), ("host", "device")], 2 * sum(shards))
    _, moved, shards = trained(2, optimizer="nvme")
    stored = sum(round_up(12 * numel, 4096) for numel in shards)
    assert moved == {("nvme", "host"): stored, ("host", "nvme"): stored}
    engine, moved, shards = trained(3, optimizer="nvme", params="nvme", grads="host")
    touched = [(numel, bool(master.owned)) for numel, master in zip(shards, engine.masters, strict=True)]
    state = sum(round_up(12 * numel, 4096) for numel, owned in touched if owned)
    gathered = 2 * sum(shards) - gathered_once(engine) // world.size
    assert engine.traffic.last_elements["gather"] == gathered * world.size
    wanted = {
        ("nvme", "device"): 2 * gathered,
        ("device", "host"): 2 * sum(shards),
        ("nvme", "host"): state,
        ("host", "nvme"): state + sum(2 * numel for numel, owned in touched if owned),
    }
    assert moved == Counter(wanted)  # no entry is zero


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


def best(sizes: list[int], ratio: float) -> int:
    """The largest sum of a subset that the ratio allows, by trying all."""
    sums = (sum(some) for count in range(len(sizes) + 1) for some in itertools.combinations(sizes, count))
    return max(total for total in sums if total <= ratio * sum(sizes))


def test_units_are_chosen_from_below() -> None:
    seed = torch.seed()
    print(f"seed {seed}")
    dice = random.Random(seed)
    for _ in range(200):
        sizes = [dice.randint(1, 50) for _ in range(dice.randint(1, 9))]
        ratio = dice.uniform(0.01, 1)
        moved = sum(sizes[index] for index in largest_within_ratio(sizes, ratio))
        assert moved <= ratio * sum(sizes)
        left = [size for index, size in enumerate(sizes) if index not in largest_within_ratio(sizes, ratio)]
        assert all(moved + size > ratio * sum(sizes) for size in left)  # nothing more fits
        assert 2 * moved >= best(sizes, ratio)
    assert largest_within_ratio([5, 5, 5, 5], 0.5) == {0, 1}
    assert largest_within_ratio([3, 9, 4], 1.0) == {0, 1, 2}


def elements(engine: Engine, tier: str) -> list[int]:
    """This rank's elements of every unit whose optimizer lives in ``tier``."""
    return [master.state.numel for master in engine.masters if master.state.tier == tier]


@on_ranks(1, 2)
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_results(world: World, tier: str) -> None:
    for stage, plan in ((1, PLANS[1]), (2, PLANS[2]), (3, PLANS[1]), (3, PLANS[3])):
        reference = train(world, stage, plan, {})
        for more in ({}, {"grads": tier}, {"params": "nvme", "grads": "host"}):
            if len(more) < stage:
                run = train(world, stage, plan, {"optimizer": tier, "ratio": 0.6, **more})
                assert run.engine is not None
                assert elements(run.engine, tier) and elements(run.engine, "device")
                check_equal(run, reference)
    for name in ("sgd", "nadam"):
        reference = train(world, 3, PLANS[1], {}, OPTIMIZERS[name])
        check_equal(train(world, 3, PLANS[1], {"optimizer": tier, "ratio": 0.6}, OPTIMIZERS[name]), reference)


@on_ranks(1, 2)
def test_bytes_fall_by_the_fraction(world: World) -> None:
    plan = Plan(dtype="bf16")
    before = -1
    for ratio in (0.3, 0.7, 1.0):
        run = train(world, 2, plan, {"optimizer": "host", "grads": "host", "ratio": ratio})
        assert run.engine is not None
        moved = sum(elements(run.engine, "host"))
        assert before < moved <= ratio * sum(unit.layout.shard_numel for unit in run.engine.units) * 1.1
        before = moved
        wanted = {("device", "host"): 2 * moved, ("host", "device"): 2 * moved}
        assert run.engine.tiers.transfers.last_moved == wanted
        run = train(world, 2, plan, {"optimizer": "nvme", "ratio": ratio})
        assert run.engine is not None
        stored = sum(round_up(12 * numel, 4096) for numel in elements(run.engine, "nvme"))
        wanted = {("nvme", "host"): stored, ("host", "nvme"): stored}
        assert run.engine.tiers.transfers.last_moved == Counter(wanted)
        assert run.engine.memory_breakdown()["optimizer"] == 12 * sum(elements(run.engine, "device"))


@on_ranks(1, 2)
def test_checkpoints_of_any_ratio_load_into_any_other(world: World) -> None:
    with placed({"optimizer": "nvme"}) as offload, tempfile.TemporaryDirectory() as saves:
        saves = world.everyone(saves)[0]
        model, optimizer = prepared(world, TinyModel(), offload={**offload, "ratio": 0.4})
        language_steps(world, model, optimizer, [0])
        zero_ext.save_checkpoint(saves, model)
        wanted = language_steps(world, model, optimizer, [1, 2])
        for ratio in (0.8, 1.0):
            model, optimizer = prepared(world, TinyModel(), offload={**offload, "ratio": ratio})
            zero_ext.load_checkpoint(saves, model)
            assert language_steps(world, model, optimizer, [1, 2]) == wanted
        world.barrier()


@on_ranks(1)
def test_a_ratio_below_the_smallest_unit_is_said(world: World) -> None:
    with pytest.warns(RuntimeWarning, match="offload.ratio: 0.001 keeps the whole optimizer on the device"):
        run = train(world, 3, Plan(), {"optimizer": "host", "ratio": 0.001})
    assert run.engine is not None and not elements(run.engine, "host")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(world, 3, Plan(), {"optimizer": "host", "ratio": 0.5})


@on_ranks(1, 2)
def test_updates_in_backward_keep_no_gradients_of_the_units_that_stay(world: World) -> None:
    for tier in ("host", "nvme"):
        for stage, grads in ((2, "device"), (3, tier)):
            reference = train(world, stage, Plan(), {})
            offload = {"optimizer": tier, "grads": grads, "ratio": 0.6, "update_mode": "in_backward"}
            run = train(world, stage, Plan(), offload)
            check_equal(run, reference)
            assert run.engine is not None and elements(run.engine, "device")
            resident = {
                unit.name: sum(run.engine.gradients_of(unit).allocated_bytes().values())
                for unit in (master.unit for master in run.engine.masters if master.state.tier == "device")
            }
            assert not any(resident.values()), (tier, stage, resident)
            moved = sum(elements(run.engine, tier))
            assert run.engine.memory_breakdown()["grads"] == (4 * moved if grads == "host" else 0)
