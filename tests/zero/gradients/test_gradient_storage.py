"""Storage of reduced gradients against plain sums; on NVMe between backward and step, and when it fails."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.gradients.test_accumulator import after_backward, check_step, close, total_norm
from tests.zero.models import language_batch, language_loss
from tests.zero.training import placed
from zero_ext import ops
from zero_ext.config import AioConfig, OffloadConfig, Tier
from zero_ext.offload import TierManager
from zero_ext.zero import engine_of
from zero_ext.zero.gradients import nvme_gradient_storage
from zero_ext.zero.gradients.gradient_storage import (
    CopyInOrder,
    GradientStorage,
    Lifetime,
    MemoryGradientStorage,
    Squares,
)
from zero_ext.zero.gradients.nvme_gradient_storage import NvmeGradientStorage
from zero_ext.zero.memory.pool import BufferPool
from zero_ext.zero.memory.pool_plan import plan_pool
from zero_ext.zero.step.step_errors import FiniteChecks

NUMEL = 5000
Make = Callable[[BufferPool, TierManager], GradientStorage]


def memory(tier: Tier, lifetime: Lifetime) -> Make:
    def make(pool: BufferPool, tiers: TierManager) -> GradientStorage:
        storage = MemoryGradientStorage(
            tier, NUMEL, torch.bfloat16, torch.float32, pool, pool, tiers.transfers, lifetime
        )
        full = torch.full((3 * NUMEL,), float("nan"), dtype=torch.bfloat16)
        if lifetime == "alias":
            storage.alias(full[NUMEL : 2 * NUMEL])
        storage.change(0, NUMEL, lambda values: values.fill_(float("nan")))
        return storage

    return make


def nvme(pool: BufferPool, tiers: TierManager) -> GradientStorage:
    return NvmeGradientStorage(NUMEL, torch.bfloat16, torch.float32, pool, tiers)


STORAGES: dict[str, Make] = {
    "device": memory("device", "permanent"),
    "host": memory("host", "permanent"),
    "alias": memory("device", "alias"),
    "pooled": memory("device", "pooled"),
    "nvme": nvme,
}


def reduce_into(storage: GradientStorage, pool: BufferPool, values: torch.Tensor) -> None:
    """What a reduction does whose result is ``values``."""
    target = storage.begin_reduction()
    if target is None:
        nbytes = -(-NUMEL * storage.dtype.itemsize // storage.alignment) * storage.alignment
        buffer = pool.acquire(nbytes)
        buffer.view(storage.dtype)[:NUMEL].copy_(values)
        storage.adopt(buffer, storage.dtype)
        return
    target.copy_(target + values if storage.valid else values)
    storage.complete_reduction()


def stored(storage: GradientStorage) -> torch.Tensor:
    return visited(storage, 0, NUMEL)


def visited(storage: GradientStorage, begin: int, end: int) -> torch.Tensor:
    return torch.cat([chunk.clone() for chunk in storage.visit(begin, end)])


def check_squares(storage: GradientStorage) -> None:
    ours, plain = Squares(), torch.zeros(ops.ACCUMULATOR_ENTRIES, dtype=torch.int64)
    storage.add_squares(ours)
    ops.squared_norm_(stored(storage), plain)
    assert ops.squared_norm_value(ours.total()) == ops.squared_norm_value(plain) > 0


@pytest.mark.parametrize("name", sorted(STORAGES))
def test_stores_adds_and_clears(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        nvme_gradient_storage, "GRADIENT_CHUNK_ELEMENTS", nvme_gradient_storage.GRAIN
    )  # the gradient has three
    pool = BufferPool(plan_pool([]))
    tiers = TierManager(OffloadConfig(grads="nvme", nvme_paths=(str(tmp_path),)), AioConfig(), {})
    tiers.reserve(tiers.stored_bytes("nvme", NUMEL, torch.float32))
    storage = STORAGES[name](pool, tiers)
    for _ in range(2):
        first, second = (torch.randn(NUMEL).bfloat16() for _ in range(2))
        assert not storage.valid
        narrow = storage.dtype is torch.bfloat16
        reduce_into(storage, pool, first)
        assert storage.valid and torch.equal(stored(storage), first if narrow else first.float())
        reduce_into(storage, pool, second)
        check_squares(storage)
        storage.wait_transfers()
        wanted = first.float() + second.float()
        assert storage.dtype is torch.float32 and torch.equal(stored(storage), wanted)
        assert torch.equal(storage.shard().read(0, NUMEL), wanted)
        storage.change(700, 4900, lambda chunk: chunk.mul_(0.5))
        wanted[700:4900] *= 0.5
        assert torch.equal(visited(storage, 600, 4999), wanted[600:4999])
        assert torch.equal(stored(storage), wanted)
        check_squares(storage)
        wanted[600:4999] = torch.randn(4399)
        storage.change(600, 4999, CopyInOrder(wanted[600:4999]))
        assert torch.equal(stored(storage), wanted)
        storage.forget()
        assert not storage.valid
        assert pool.live_bytes == 0


@contextlib.contextmanager
def on_nvme(world: World, **more: Any) -> Iterator[tuple[Any, Any, nn.Module]]:
    """See ``after_backward``; gradients are on NVMe and move in pieces of one block."""
    one_block = mock.patch.object(
        nvme_gradient_storage, "GRADIENT_CHUNK_ELEMENTS", nvme_gradient_storage.GRAIN
    )
    with one_block, placed({"grads": "nvme", **more}) as offload:
        yield after_backward(world, 3, offload=offload)


@on_ranks(1, 2)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clip_grad_norm(world: World, norm_type: float) -> None:
    for ours in (False, True):
        with on_nvme(world) as (model, optimizer, twin):
            if ours:
                norm = model.clip_grad_norm_(0.05, norm_type)
            else:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)
            close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 0.05, norm_type))
            close(model.clip_grad_norm_(1e9), 0.05 if norm_type == 2 else total_norm(twin))
            check_step(model, optimizer, twin)


@on_ranks(1, 2)
def test_values_scaling_and_clearing(world: World) -> None:
    with on_nvme(world, optimizer="nvme") as (model, optimizer, twin):
        pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
        for number, (ours, plain) in enumerate(pairs):
            close(zero_ext.full_gradient(ours), plain.grad)
            for gradient in (ours.grad, plain.grad):
                if number % 3 == 0:
                    gradient.mul_(0.5)
                elif number % 3 == 1:
                    gradient.zero_()
            close(ours.grad.norm(), plain.grad.norm())
        close(pairs[0][0].grad.sum(), pairs[0][1].grad.sum())
        check_step(model, optimizer, twin)


@on_ranks(1, 2)
def test_what_is_not_finite_is_found_by_name(world: World) -> None:
    with on_nvme(world) as (model, _, _):
        name, parameter = next(iter(model.named_parameters()))
        parameter.grad.mul_(float("inf"))
        engine = engine_of(model)
        checks = FiniteChecks(engine.masters, engine.optimizer_step._gradients, engine.collectives)
        assert engine.norms.total().isnan() and not checks.gradients_are_finite()
        assert checks.names().gradients == (f"'{name}'",)


def inject(world: World, model: Any, writing: bool, calls: int = 1) -> None:
    """Rank 0's next transfers fail."""
    if world.rank == 0:
        store = engine_of(model).tiers.store
        ops.store_inject_fault(store.handle, writing, 0, -errno.EIO, calls)


def backward(world: World, model: Any, number: int) -> None:
    language_loss(model, language_batch(world.seed, number, 0, world.rank)).backward()


@on_ranks(1, 2)
def test_a_gradient_that_cannot_be_stored_is_an_error_of_backward_on_all_ranks(world: World) -> None:
    for writing in (True, False):
        with on_nvme(world) as (model, optimizer, twin):
            if writing:
                optimizer.zero_grad()
            inject(world, model, writing)  # reading: to add a second micro-batch to the first
            with pytest.raises(
                RuntimeError, match=r"gradients on NVMe failed on ranks \[0\].*zero_grad"
            ) as caught:
                backward(world, model, 0)
            assert world.rank or "Input/output error" in str(caught.value)
            for _ in range(2):  # it stays lost, whatever comes
                with pytest.raises(RuntimeError, match=r"failed on ranks \[0\]"):
                    optimizer.step()
                with pytest.raises(RuntimeError, match=r"failed on ranks \[0\]"):
                    backward(world, model, 1)
            assert engine_of(model).pool.live_bytes == 0
            optimizer.zero_grad()
            backward(world, model, 0)
            check_step(model, optimizer, twin)


@on_ranks(1, 2)
def test_a_gradient_that_cannot_be_read_is_an_error_on_all_ranks(world: World) -> None:
    for use in ("norm", "full", "step", "scale"):
        with on_nvme(world) as (model, optimizer, _):
            parameter = next(model.parameters())
            inject(world, model, False)
            with pytest.raises(RuntimeError, match=r"failed on ranks \[0\]"):
                if use == "norm":
                    parameter.grad.norm()
                elif use == "full":
                    zero_ext.full_gradient(parameter)
                elif use == "scale":
                    parameter.grad.mul_(2.0)
                    optimizer.step()
                else:
                    optimizer.step()
            assert engine_of(model).pool.live_bytes == 0
            damaged = engine_of(model).optimizer_step.damage is not None
            assert damaged == (use == "step")
