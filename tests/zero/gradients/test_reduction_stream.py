"""Gradients are packed and added up beside the stream of backward, in memory that nobody takes too early."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import configuration, prepared, sgd
from zero_ext import ops
from zero_ext.offload import Device
from zero_ext.zero import engine_of
from zero_ext.zero.gradients.accumulator import UnitGradients
from zero_ext.zero.memory.pool import BufferPool
from zero_ext.zero.memory.pool_plan import PoolPlan

NBYTES = 4096


class Watch:
    """What happens in a backward pass of ``engine``: whether ops run in the ``outer`` stream, how many units
    wait to be packed whenever a gradient comes, and whether the memory of packed ones is kept until then."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.outer = torch.accelerator.current_stream()
        self.outside: list[bool] = []
        self.waiting: list[int] = []
        self.retained: list[bool] = []
        self.retained_longer: list[bool] = []
        self._packed: list[StorageWeakRef] = []

    @contextlib.contextmanager
    def watching(self) -> Any:
        add = UnitGradients.add
        self._packed.clear()

        def watched_add(gradients: UnitGradients, index: int, gradient: torch.Tensor) -> None:
            self.retained += [not each.expired() for each in self._packed]
            add(gradients, index, gradient)
            self.retained_longer += [not each.expired() for each in self._packed]
            self._packed.clear()
            self.waiting.append(sum(bool(each._waiting) for each in self.engine.reducer.gradients))

        def pack(flat: torch.Tensor, tensors: list[torch.Tensor], offsets: list[int]) -> None:
            self._packed += [StorageWeakRef(each.untyped_storage()) for each in tensors]
            original_pack(flat, tensors, offsets)

        original_pack = self._noted(ops.pack_)
        with (
            mock.patch.object(UnitGradients, "add", watched_add),
            mock.patch.object(ops, "pack_", pack),
            mock.patch.object(ops, "sum_shards_", self._noted(ops.sum_shards_)),
        ):
            yield

    def _noted(self, original: Callable[..., None]) -> Callable[..., None]:
        def op(*arguments: Any) -> None:
            self.outside.append(torch.accelerator.current_stream() == self.outer)
            original(*arguments)

        return op


@on_ranks(1, 2, stand_in=True)
@pytest.mark.parametrize("accumulation", ["declared", "no_sync"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_backward_goes_on_and_its_gradients_do_not_pile_up(
    world: World, stage: int, accumulation: str
) -> None:
    """Whether a pass reduces them or not, gradients of autograd wait while their unit is not complete, and
    until the next one comes."""
    torch.manual_seed(world.seed)
    model = TinyModel().to("stand_in")
    config = configuration(stage) | {"units": {"bucket_elements": 700}}
    if accumulation == "declared":
        config["batch"] = {"gradient_accumulation_steps": 2}
    model, optimizer = zero_ext.prepare(model, sgd(model.parameters()), config, process_group=world.group)
    watch = Watch(engine_of(model))
    for number in range(2):
        retained = number == 0 and accumulation == "no_sync"
        with watch.watching(), model.no_sync() if retained else contextlib.nullcontext():
            language_loss(model, language_batch(world.seed, number, 0, world.rank).to("stand_in")).backward()
    assert watch.outside
    assert not any(watch.outside)
    assert max(watch.waiting) <= 2 < len(engine_of(model).units)
    assert watch.retained
    assert all(watch.retained)
    assert not any(watch.retained_longer)
    optimizer.step()


@on_ranks(2, stand_in=True)
def test_collectives_of_several_phases_continue_in_it(world: World) -> None:
    model = TinyModel().to("stand_in")
    model, _ = prepared(world, model, 3, sgd)
    collectives, outer = engine_of(model).collectives, torch.accelerator.current_stream()
    for exchange in (collectives._gathers, collectives._reductions):
        with exchange.order.beside():
            assert torch.accelerator.current_stream() != outer


@pytest.mark.parametrize("planned", [0, NBYTES])
@on_ranks(1, stand_in=True)
def test_memory_released_on_the_stream_is_reused_after_its_use(world: World, planned: int) -> None:
    """In the region and beside it."""
    torch.stand_in.set_schedule("lazy")  # type: ignore[attr-defined]
    device = Device(torch.device("stand_in", 0))
    pool = BufferPool(PoolPlan(planned, {}), device)
    wanted = torch.randn(NBYTES // 4, generator=torch.Generator().manual_seed(world.seed))
    source = wanted.to("stand_in")
    torch.accelerator.synchronize()
    with device.reduction_stream.entered(), pool.growing():
        lent = pool.acquire(NBYTES)
        address = lent.data_ptr()
        lent.view(torch.float32).copy_(source)
        pool.release(lent)
    with pool.growing():
        again = pool.acquire(NBYTES)
    assert again.data_ptr() == address
    assert torch.equal((again.view(torch.float32) + 1).cpu(), wanted + 1)
