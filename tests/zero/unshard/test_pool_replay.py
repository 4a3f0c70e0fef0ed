"""Units of which only sizes exist change their states in the order in which the engine's units do."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import adamw, configuration
from zero_ext.zero import engine_of
from zero_ext.zero.units.unit import Unit
from zero_ext.zero.unshard.pool_replay import PlannedPasses, PlannedUnit

TRANSITIONS = ("to_fetching", "to_gathering", "to_gathered", "set_aside", "to_released")


@contextmanager
def noted(kind: type[Any], found: list[tuple[str, str]]) -> Iterator[None]:
    """Notes the transitions of all units of ``kind``, with their names."""

    def noting(name: str) -> Any:
        original = getattr(kind, name)

        def note(unit: Any, *args: Any) -> None:
            found.append((name, unit.spec.name))
            original(unit, *args)

        return mock.patch.object(kind, name, note)

    with ExitStack() as stack:
        for name in TRANSITIONS:
            stack.enter_context(noting(name))
        yield


@pytest.mark.parametrize(
    ("units", "tier"),
    [
        ({}, "device"),
        ({"prefetch_elements": 0}, "device"),
        ({"prefetch_elements": 1}, "device"),
        ({"prefetch_elements": 1}, "nvme"),
        ({"reuse_elements": 3000}, "host"),
        ({"max_live_elements": 5000}, "device"),
        ({"max_live_elements": 7000, "reuse_elements": 1 << 30}, "nvme"),
        ({"reuse_elements": 1 << 30}, "device"),
    ],
)
@on_ranks(2)
def test_a_planned_step_is_the_engines(world: World, units: dict[str, Any], tier: str) -> None:
    torch.manual_seed(world.seed)
    model = TinyModel(layers=5)
    with tempfile.TemporaryDirectory() as folder:
        offload = {"params": tier, **({"nvme_paths": [folder]} if tier == "nvme" else {})}
        config = configuration(3, units=units, offload=offload)
        prepared, optimizer = zero_ext.prepare(
            model, adamw(model.parameters()), config, process_group=world.group
        )
        engine = engine_of(prepared)

        def loss_of(step: int) -> torch.Tensor:
            return language_loss(prepared, language_batch(world.seed, step, 0, world.rank))

        for step in range(2):  # learns the orders
            loss_of(step).backward()
            optimizer.step()
            optimizer.zero_grad()
        run, planned = list[tuple[str, str]](), list[tuple[str, str]]()
        with noted(Unit, run):
            loss_of(2).backward()
        specs = [unit.spec for unit in engine.units]
        sharded = [PlannedUnit(spec) for spec in specs if spec.placement.params]
        passes = PlannedPasses(sharded, 1 + max(spec.gathered[1] for spec in specs), engine.config.units)
        with noted(PlannedUnit, planned):
            for each in (passes.forward(), passes.backward()):
                for _ in each:
                    pass
        assert len({name for _, name in run}) >= 5
        assert planned == run
