"""A model that is dropped is gone, with its memory and transports, and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _world

import zero_ext
from tests.accelerator.stand_in import BACKEND
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


ROUNDS = (36, 42, 48)  # the first ones use each of the 32 streams that a device keeps for good


def held() -> dict[str, int]:
    """Communicators that torch knows, threads, open files, and names in shared memory of this process."""
    gc.collect()
    shared = f"zero_ext-{os.getpid()}-"
    return {
        "groups": len(_world.pg_map),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "shared memory": sum(each.name.startswith(shared) for each in Path("/dev/shm").iterdir()),
        "mapped": Path("/proc/self/maps").read_text().count("zero_ext"),
    }


def train_and_drop(world: World, device: str, stage: int) -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer = zero_ext.prepare(model, optimizer, {"stage": stage}, process_group=world.group)
    model(torch.ones(2, 8, device=device)).sum().backward()
    optimizer.step()


def assert_nothing_is_left(world: World, device: str, stage: int) -> None:
    counts = []
    for number in range(1, ROUNDS[-1] + 1):
        train_and_drop(world, device, stage)
        if number in ROUNDS:
            world.barrier()
            counts.append(held())
    assert counts[1] == counts[0] and counts[2] == counts[0], counts
    assert counts[0]["shared memory"] == 0


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_over_the_host(world: World, stage: int) -> None:
    assert_nothing_is_left(world, "cpu", stage)


@pytest.mark.parametrize("backend", ["gloo", BACKEND])
@on_ranks(2, stand_in=True)
def test_on_a_device(world: World, backend: str) -> None:
    with mock.patch.object(dist, "get_backend_config", lambda group: f"stand_in:{backend}"):
        assert_nothing_is_left(world, "stand_in", 3)
