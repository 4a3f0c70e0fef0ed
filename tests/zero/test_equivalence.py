"""Every stage, accumulation, clipping, precision and transport trains like torch, and like the others."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.step.delayed_transport import DelayedTransport, delays
from tests.zero.training import (
    Plan,
    Run,
    adamw,
    check_close,
    check_equal,
    configuration,
    distance,
    train_plain,
    train_prepared,
)
from zero_ext.comm import CrossProcessTransport, ProcessGroupTransport
from zero_ext.comm.process_group import make_collectives

PLANS = [
    Plan(),
    Plan(clip=0.1),
    Plan(micro_batches=2, accumulation="declared"),
    Plan(micro_batches=2, accumulation="undeclared", clip=0.1),
    Plan(micro_batches=2, accumulation="no_sync"),
    Plan(micro_batches=3, accumulation="declared", clip=0.1),
    Plan(micro_batches=3, accumulation="undeclared"),
    Plan(micro_batches=3, accumulation="no_sync", clip=0.1),
]


def runs_of_all_stages(world: World, plan: Plan) -> tuple[list[Run], Run]:
    model = TinyModel()
    runs = []
    for stage in range(4):
        config = configuration(stage, plan, units={"bucket_elements": 700})
        runs.append(train_prepared(world, copy.deepcopy(model), language_loss, language_batch, config, plan))
    return runs, train_plain(world, model, language_loss, language_batch, plan)


@on_ranks(1, 2, 3, 4, by_turns=True)
@pytest.mark.parametrize("number", range(len(PLANS)))
def test_fp32_matrix(world: World, number: int) -> None:
    plan = PLANS[number]
    runs, plain = runs_of_all_stages(world, plan)
    one_order = world.size == 1 or plan.micro_batches == 1 or plan.accumulation == "no_sync"
    check_equal(runs[0], runs[1])
    check_equal(runs[2], runs[3])
    if one_order:
        check_equal(runs[0], runs[2])
    for run in runs:
        check_close(run, plain)


@on_ranks(1, 2, 3, by_turns=True)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("number", [0, 1, 4, 5])
def test_low_precision_matrix(world: World, number: int, dtype: str) -> None:
    plan = PLANS[number]
    runs, plain = runs_of_all_stages(world, plan._replace(dtype=dtype))
    for run in runs:
        for one, two in zip(run.losses, plain.losses, strict=True):
            assert abs(one - two) <= 4e-3 * abs(two), (plan, run.losses, plain.losses)
        assert distance(run.parameters, plain.parameters) <= 4e-3
        assert {value.dtype for value in run.parameters.values()} == {
            torch.bfloat16 if dtype == "bf16" else torch.float16
        }


@on_ranks(2, 3)
def test_twenty_steps_against_ddp(world: World) -> None:
    plan = Plan(steps=20, clip=1.0)
    model = TinyModel()
    twin = DistributedDataParallel(copy.deepcopy(model), process_group=world.group)
    optimizer = adamw(twin.parameters())
    losses = []
    for step in range(plan.steps):
        loss = language_loss(twin, language_batch(world.seed, step, 0, world.rank))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), plan.clip)
        optimizer.step()
        losses.append(loss.item())
    for stage in range(4):
        run = train_prepared(
            world, copy.deepcopy(model), language_loss, language_batch, configuration(stage, plan), plan
        )
        for one, two in zip(run.losses, losses, strict=True):
            assert abs(one - two) <= 1e-6 * abs(two), (stage, run.losses, losses)
        assert distance(run.parameters, twin.module.state_dict()) <= 1e-6


def train(world: World, model: TinyModel, stage: int, plan: Plan, **units: int) -> Run:
    config = configuration(stage, plan, units=units)
    return train_prepared(world, copy.deepcopy(model), language_loss, language_batch, config, plan)


@on_ranks(2, 3)
def test_over_the_process_group_alone(world: World) -> None:
    model = TinyModel()
    for stage in range(4):
        for plan in (Plan(clip=0.1), Plan(micro_batches=2, dtype="bf16")):
            fast = train(world, model, stage, plan)
            fastest = "zero_ext.comm.process_group.fastest_host_transport"
            with mock.patch(fastest, lambda group, _: ProcessGroupTransport(group)):
                slow = train(world, model, stage, plan)
            assert slow.engine is not None
            assert isinstance(slow.engine.collectives._gathers.unordered, ProcessGroupTransport)
            check_equal(slow, fast)


@on_ranks(2)
def test_storages_that_cannot_be_swapped_are_resized(world: World) -> None:
    model = TinyModel(tied=True)
    swapped = train(world, model, 3, Plan())
    with mock.patch("zero_ext.zero.memory.pool.hasattr", lambda *_: False, create=True):
        check_equal(train(world, model, 3, Plan()), swapped)


@on_ranks(2, 3, by_turns=True)
def test_nothing_is_read_before_it_was_waited_for(world: World) -> None:
    """Under random delays, with results poisoned until then."""
    model = TinyModel(layers=2, tied=True)
    for number, plan in enumerate([PLANS[1], PLANS[3], PLANS[4], PLANS[0]._replace(dtype="bf16")]):
        for stage in range(4):
            units = {"bucket_elements": 700, "persistence_threshold": 20 if number == 0 else 0}
            quiet = train(world, model, stage, plan, **units)
            with delays(world.seed + world.rank):
                check_equal(train(world, model, stage, plan, **units), quiet)


@on_ranks(2)
def test_the_shim_shows_a_read_before_wait_and_a_write_to_what_is_being_sent(world: World) -> None:
    with delays(world.seed):
        collectives = make_collectives(world.group, 20.0)
    transport = collectives._gathers.unordered
    assert isinstance(transport, DelayedTransport)
    assert isinstance(transport._inner, ProcessGroupTransport | CrossProcessTransport)
    flat, own = torch.zeros(4), torch.full((2,), 1.0 + world.rank)
    pending = collectives.gather(flat, own, "gather", "test")
    assert flat.isnan().sum() == 2
    pending.wait()
    assert flat.tolist() == [1.0, 1.0, 2.0, 2.0]
    transport._longest = 0.5
    pending = collectives.gather(flat, own, "gather", "test")
    flat[2 * world.rank : 2 * world.rank + 2] = 7.0
    pending.wait()
    assert flat.tolist() == [7.0] * 4
