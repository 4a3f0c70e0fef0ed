"""The elements that a step sends, counted before the factor (N - 1) / N: exactly the formulas."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import adamw, configuration, gathered_once
from zero_ext.zero import Engine, engine_of

PARAMETER_KINDS = {"gather", "gather_updated", "gather_gradients", "reduce_scatter"}


def third_step(world: World, stage: int, micro_batches: int, no_sync: bool, **more: Any) -> Engine:
    """The engine after three steps; its traffic statistics' ``last_*`` hold the third one."""
    config = configuration(stage, **more)
    if not no_sync:
        config["batch"] = {"gradient_accumulation_steps": micro_batches}
    model = TinyModel()
    model, optimizer = zero_ext.prepare(model, adamw(model.parameters()), config, process_group=world.group)
    for step in range(3):
        for micro in range(micro_batches):
            local = no_sync and micro + 1 < micro_batches
            with model.no_sync() if local else contextlib.nullcontext():
                language_loss(model, language_batch(world.seed, step, micro, world.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine_of(model)


def parameter_elements(engine: Engine) -> int:
    traffic = engine.collectives.traffic
    return sum(count for kind, count in traffic.last_elements.items() if kind in PARAMETER_KINDS)


@on_ranks(2, 3, by_turns=True)
@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_elements_of_a_step(world: World, stage: int, no_sync: bool) -> None:
    for k in (1, 2, 3):
        engine = third_step(world, stage, k, no_sync)
        padded = sum(unit.layout.numel for unit in engine.units)
        factors = {0: 2, 1: 2, 2: 2 if no_sync else k + 1, 3: 2 * k + 1 if no_sync else 3 * k}
        once = k * gathered_once(engine) if stage == 3 else 0
        assert parameter_elements(engine) == factors[stage] * padded - once, engine.traffic.last_elements
        others = set(engine.collectives.traffic.last_elements) - PARAMETER_KINDS
        assert others == {"scalars"}


@on_ranks(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_sends_nothing(world: World, stage: int) -> None:
    engine = third_step(world, stage, 2, False)
    assert not engine.collectives.traffic.last_elements
    assert not engine.collectives.traffic.last_bytes_sent


@on_ranks(2, 3)
def test_bytes_sent_are_the_elements_of_the_other_ranks(world: World) -> None:
    for stage in range(4):
        traffic = third_step(world, stage, 1, False).collectives.traffic
        for kind in PARAMETER_KINDS & set(traffic.last_elements):
            assert (
                traffic.last_bytes_sent[kind]
                == 4 * traffic.last_elements[kind] * (world.size - 1) // world.size
            )


@on_ranks(2)
def test_persistent_parameters_are_counted_separately(world: World) -> None:
    engine = third_step(world, 3, 1, False, units={"persistence_threshold": 100})
    persistent = sum(unit.layout.numel for unit in engine.units if unit.spec.persistent)
    sharded = sum(unit.layout.numel for unit in engine.units if not unit.spec.persistent)
    elements = engine.collectives.traffic.last_elements
    assert persistent and sharded
    assert elements["gather"] == 2 * sharded - gathered_once(engine)
    assert elements["reduce_scatter"] == sharded
    assert elements["reduce_scatter_persistent"] == elements["gather_updated_persistent"] == persistent


@on_ranks(2)
def test_frozen_parameters_are_gathered_but_never_reduced(world: World) -> None:
    model = TinyModel()
    model.embedding.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = zero_ext.prepare(model, adamw(trained), configuration(3), process_group=world.group)
    for step in range(2):
        language_loss(model, language_batch(world.seed, step, 0, world.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    frozen = {unit for unit in engine.units if unit not in {master.unit for master in engine.masters}}
    reduced = sum(unit.layout.numel for unit in engine.units if unit not in frozen)
    assert engine.collectives.traffic.last_elements["reduce_scatter"] == reduced
    assert sum(unit.layout.numel for unit in frozen) > 0
