"""Each storage of reduced gradients compared with plain sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zero_ext import ops
from zero_ext.config import AioConfig, OffloadConfig, Tier
from zero_ext.offload import TierManager
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
