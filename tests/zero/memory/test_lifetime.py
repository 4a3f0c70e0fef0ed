"""A model that is dropped is gone, with its memory and transports, without a cycle collection."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import adamw, configuration
from zero_ext import ops
from zero_ext.zero import engine_of


def trained(world: World, stage: int, wrap: bool, steps: int) -> tuple[Any, Any]:
    model = TinyModel(layers=2, tied=True)
    optimizer, config = adamw(model.parameters()), configuration(stage)
    model, optimizer = zero_ext.prepare(model, optimizer, config, process_group=world.group, wrap=wrap)
    for step in range(steps):
        language_loss(model, language_batch(world.seed, step, 0, world.rank)).backward()
        optimizer.step()
        if step:
            optimizer.zero_grad()
    return model, optimizer


@on_ranks(1, 2)
def test_a_dropped_model_is_freed_at_once(world: World) -> None:
    for stage in (0, 1, 2, 3):
        for wrap in (True, False):
            for steps in (0, 1, 2):
                gc.collect()
                before = ops.host_buffer_bytes()
                gc.disable()
                try:
                    model, optimizer = trained(world, stage, wrap, steps)
                    inner = model.module if wrap else model
                    watched = {
                        "model": weakref.ref(inner),
                        "engine": weakref.ref(engine_of(model)),
                        "unit": weakref.ref(engine_of(model).units[0]),
                        "parameter": weakref.ref(inner.norm.weight),
                        "gathers": weakref.ref(engine_of(model).collectives._gathers),
                    }
                    assert ops.host_buffer_bytes() > before
                    del model, inner, optimizer
                    alive = [name for name, reference in watched.items() if reference() is not None]
                    assert not alive, (stage, wrap, steps, alive)
                    assert ops.host_buffer_bytes() == before, (stage, wrap, steps)
                finally:
                    gc.enable()


@on_ranks(2)
def test_the_optimizer_alone_says_that_its_model_is_gone(world: World) -> None:
    model, optimizer = trained(world, 3, True, 1)
    del model
    with pytest.raises(RuntimeError, match="deleted"):
        _ = optimizer.engine.model
