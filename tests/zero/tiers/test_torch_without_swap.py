"""PyTorch 2.11 has no swap of storages: gathered units lie in the planned pool all the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.ops.torch_2_11 import hide_swap
from tests.zero import test_accelerator
from tests.zero.models import TinyModel
from tests.zero.step import test_memory_breakdown
from tests.zero.tiers import test_tiers
from tests.zero.training import DEFAULT, Plan, adamw, check_equal, check_same, configuration, language_steps
from zero_ext import ops
from zero_ext.zero import engine_of
from zero_ext.zero.memory.gathered_unit import UnitState


@contextmanager
def torch_2_11() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        hide_swap(patch)
        assert not ops.torch_swaps_storages()
        yield


@on_ranks(1, 2)
def test_every_stage_and_tier_trains_as_ever(world: World) -> None:
    for number, stage in enumerate(range(4)):
        plan = test_tiers.PLANS[(number + world.seed) % len(test_tiers.PLANS)]
        reference = test_tiers.train(world, stage, plan, {})
        choices = test_tiers.combinations(stage)
        with torch_2_11():
            for offload in choices[world.seed % 5 :: 5] if stage == 3 else choices[:: max(stage, 1)]:
                check_equal(test_tiers.train(world, stage, plan, offload), reference)


@on_ranks(2)
def test_live_storages_match_the_memory_breakdown(world: World) -> None:
    with torch_2_11():
        test_memory_breakdown.test_bytes_of_a_rank.on_one_rank(world, 3)


def gathered_addresses(model: nn.Module) -> list[int]:
    """Where the units lay, each time that a block ran forward."""
    engine, found = engine_of(model), []

    def note(*_: Any) -> None:
        found.extend(unit.flat.data_ptr() for unit in engine.units if unit.state is not UnitState.RELEASED)

    for block in model.blocks:
        block.register_forward_pre_hook(note)
    return found


@on_ranks(2)
def test_gathered_units_lie_in_the_pool(world: World) -> None:
    with torch_2_11():
        model = TinyModel()
        config = configuration(3)
        model, optimizer = zero_ext.prepare(
            model, adamw(model.parameters()), config, process_group=world.group
        )
        pool = engine_of(model).pool
        held, found = ops.host_buffer_bytes(), gathered_addresses(model.module)
        language_steps(world, model, optimizer, range(3))
        begin = pool._region.data_ptr()
        assert found and all(begin <= address < begin + pool._region.nbytes for address in found)
        assert pool.overflow.total_bytes == 0 and ops.host_buffer_bytes() == held


@on_ranks(1, stand_in=True)
def test_on_an_accelerator(world: World) -> None:
    with torch_2_11():
        test_accelerator.test_memory_matches_the_breakdown_and_the_plan.on_one_rank(world)
    for number, tier in enumerate(("host", "nvme")):
        plan = (DEFAULT, Plan(micro_batches=2, clip=0.1, dtype="bf16"))[(number + world.seed) % 2]
        reference = test_accelerator.train(world, "cpu", 3, plan, {})
        with torch_2_11():
            offload = dict.fromkeys(test_accelerator.KINDS, tier)
            check_equal(test_accelerator.on_accelerator(world, number, 3, plan, offload), reference)


@on_ranks(2, stand_in=True)
def test_on_accelerators_of_two_ranks(world: World) -> None:
    reference = test_accelerator.train(world, "cpu", 3, DEFAULT, {})
    with torch_2_11():
        check_equal(test_accelerator.on_accelerator(world, world.seed, 3, DEFAULT, {}), reference)


@on_ranks(2)
def test_a_rank_that_cannot_compile_it_stops_all_before_anything_changes(world: World) -> None:
    model = TinyModel()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    failure = RuntimeError("no C++ compiler was found") if world.rank == 1 else None
    with torch_2_11(), mock.patch.object(ops, "load_storage_swap", side_effect=failure):
        with pytest.raises(
            RuntimeError, match=r"compiling zero_ext._C_storage failed on ranks \[1\].*changed"
        ):
            zero_ext.prepare(model, adamw(model.parameters()), {"stage": 3}, process_group=world.group)
        zero_ext.prepare(
            TinyModel(), None, {"stage": 2}, process_group=world.group
        )  # gathers nothing, needs nothing
    check_same(model.state_dict(), before)
