"""Units that stay gathered until their next use: what is sent, what is live, and that values are the same."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import Plan, adamw, check_equal, configuration, language_steps, train_prepared
from zero_ext.plan import model_staging
from zero_ext.zero import engine_of

ALL = 1 << 40
LAYERS = 5


def tiny(world: World) -> TinyModel:
    torch.manual_seed(world.seed)
    return TinyModel(layers=LAYERS)


def prepared(world: World, stage: int = 3, **units: Any) -> tuple[Any, Any]:
    config = configuration(stage, units=units)
    model = tiny(world)
    return zero_ext.prepare(model, adamw(model.parameters()), config, process_group=world.group)


def step_of(world: World, model: Any, optimizer: Any, number: int) -> None:
    language_steps(world, model, optimizer, [number])


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", ["declared", "no_sync"])
def test_training_is_the_same(world: World, dtype: str, accumulation: str) -> None:
    plan = Plan(steps=3, micro_batches=2, accumulation=accumulation, clip=0.1, dtype=dtype)
    runs = []
    for units in ({}, {"reuse_elements": ALL}, {"reuse_elements": ALL, "max_live_elements": 3000}):
        config = configuration(3, plan, units=units)
        runs.append(train_prepared(world, tiny(world), language_loss, language_batch, config, plan))
    for run in runs[1:]:
        check_equal(runs[0], run)


@on_ranks(2)
def test_with_all_of_them_a_step_sends_what_stage_2_sends(world: World) -> None:
    """One gather of each unit and one reduction, and no staging beyond what was planned."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer = prepared(world, reuse_elements=ALL)
        for number in range(3):
            step_of(world, model, optimizer, number)
    engine = engine_of(model)
    numel = sum(unit.layout.numel for unit in engine.units)
    sent = engine.traffic.last_elements
    assert sent["gather"] == sent["reduce_scatter"] == numel
    replicated, steps = prepared(world, stage=2)
    for number in range(3):
        step_of(world, replicated, steps, number)
    traffic = engine_of(replicated).traffic.last_elements
    # Units of stage 2 are larger, and have less padding.
    assert traffic["gather_updated"] == pytest.approx(numel, rel=0.01)
    assert traffic["reduce_scatter"] == pytest.approx(numel, rel=0.01)


@on_ranks(2)
def test_a_unit_stays_within_the_distance_and_goes_beyond_it(world: World) -> None:
    model, optimizer = prepared(world)
    sizes = {unit.name: unit.layout.numel for unit in engine_of(model).units}
    block = sizes[f"blocks.{LAYERS - 1}"]
    # Between the last block's uses lies what follows it, forward and backward; one further back, two blocks.
    for blocks in range(1, LAYERS):
        after = sum(size for name, size in sizes.items() if not name.startswith(("blocks", "embedding")))
        reach = 2 * after + 2 * (blocks - 1) * block
        model, optimizer = prepared(world, reuse_elements=reach)
        engine = engine_of(model)
        for number in range(3):
            language_loss(model, language_batch(world.seed, number, 0, world.rank))
            retained = {unit.name for unit in engine.units if unit.is_aside}
            engine.prefetcher.release_idle()
            step_of(world, model, optimizer, number)
        stayed = {f"blocks.{number}" for number in range(LAYERS - blocks, LAYERS)}
        assert {name for name in retained if name.startswith("blocks")} == stayed, blocks


@on_ranks(2)
def test_the_cap_holds_and_look_ahead_goes_on(world: World) -> None:
    """Kept units leave room for the next one: none is gathered only when it is needed."""
    free, _ = prepared(world)
    block = max(unit.layout.numel for unit in engine_of(free).units)
    late: list[str] = []
    model, optimizer = prepared(world, reuse_elements=ALL, max_live_elements=4 * block, prefetch_elements=1)
    engine = engine_of(model)

    def received(event: Any) -> None:
        assert engine.prefetcher.live_elements <= 4 * block
        if type(event).__name__ == "GatherEvent" and not event.prefetched:
            late.append(event.unit)

    for number in range(4):
        if number == 3:
            engine.subscribe(received)
        step_of(world, model, optimizer, number)
    assert len(late) <= 1  # what forward begins with
    numel = sum(unit.layout.numel for unit in engine.units)
    assert engine.traffic.last_elements["gather"] <= 2 * numel - 2 * block


@on_ranks(2)
def test_without_autograd_token_after_token_finds_them(world: World) -> None:
    model, _ = prepared(world, reuse_elements=ALL)
    engine = engine_of(model)
    for number in range(4):
        before = engine.traffic.elements["gather"]
        with torch.no_grad():
            model(language_batch(world.seed, number, 0, world.rank)[:, :-1])
        gathered = engine.traffic.elements["gather"] - before
        assert gathered == 0 if number else gathered > 0


@on_ranks(2)
def test_values_that_change_in_between_are_seen(world: World) -> None:
    """A write, a load, and a forward that backward never follows."""
    runs = []
    for reuse in (0, ALL):
        model, optimizer = prepared(world, reuse_elements=reuse)
        losses = []
        for number in range(4):
            batch = language_batch(world.seed, number, 0, world.rank)
            losses.append(language_loss(model, batch).item())
            with torch.no_grad():
                model.head.weight.mul_(0.5)
            losses.append(language_loss(model, batch).item())
            state = {name: value * 0.9 for name, value in zero_ext.full_state_dict(model).items()}
            zero_ext.load_full_state_dict(model, state)
            step_of(world, model, optimizer, number)
        runs.append(losses)
    assert runs[0] == runs[1]


@on_ranks(2)
def test_the_plan_counts_them(world: World) -> None:
    model, optimizer = prepared(world, reuse_elements=ALL)
    for number in range(3):
        step_of(world, model, optimizer, number)
    engine = engine_of(model)
    numel = sum(unit.layout.nbytes for unit in engine.units)
    assert engine.pool.total_bytes >= numel
    assert engine.pool.overflow.total_bytes == 0
    model = tiny(world)
    config = configuration(3, units={"reuse_elements": ALL})
    planned = model_staging(model, adamw(model.parameters()), config, world.size)
    assert planned.pool.nbytes == engine.pool.total_bytes
