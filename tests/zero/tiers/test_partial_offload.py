"""A part of the optimizer in another tier: the same results, and bytes by that part."""

from __future__ import annotations

import itertools
import random
import tempfile
import warnings
from collections import Counter

import pytest
import torch

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel
from tests.zero.tiers.test_tiers import OPTIMIZERS, PLANS, round_up
from tests.zero.training import Plan, check_equal, language_steps, placed, prepared
from tests.zero.training import train_in_tiers as train
from zero_ext.zero import Engine
from zero_ext.zero.construction.grouping import largest_within_ratio


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
