"""Homes of reduced gradients, one by one, against plain sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zero_ext import ops
from zero_ext.config import AioPolicy, OffloadPolicy, Tier
from zero_ext.offload import Tiers
from zero_ext.zero.gradients import nvme_shard_io
from zero_ext.zero.gradients.gradient_storage import (
    BorrowedGradients,
    GradientHome,
    MemoryGradients,
)
from zero_ext.zero.gradients.nvme_gradients import StoredGradients
from zero_ext.zero.gradients.squared_norms import Squares
from zero_ext.zero.memory.pool import BufferPool
from zero_ext.zero.memory.pool_plan import plan_pool

NUMEL = 5000
Make = Callable[[BufferPool, Tiers], GradientHome]


def memory(tier: Tier) -> Make:
    def make(pool: BufferPool, tiers: Tiers) -> GradientHome:
        tensor = torch.full((NUMEL,), float("nan"), dtype=torch.bfloat16)
        return MemoryGradients(tier, tensor, torch.float32, pool, tiers.transfers)

    return make


def borrowed(pool: BufferPool, tiers: Tiers) -> GradientHome:
    return BorrowedGradients(NUMEL, torch.bfloat16, torch.float32, pool, tiers.transfers)


def stored(pool: BufferPool, tiers: Tiers) -> GradientHome:
    return StoredGradients(NUMEL, torch.bfloat16, torch.float32, pool, tiers)


HOMES: dict[str, Make] = {
    "device": memory("device"),
    "host": memory("host"),
    "nvme": stored,
    "borrowed": borrowed,
}


def reduce_into(home: GradientHome, pool: BufferPool, values: torch.Tensor) -> None:
    """What a reduction does whose result is ``values``."""
    target = home.begin()
    if target is None:
        nbytes = -(-NUMEL * home.dtype.itemsize // home.alignment) * home.alignment
        buffer = pool.take(nbytes)
        buffer.view(home.dtype)[:NUMEL].copy_(values)
        home.take(buffer, home.dtype)
        return
    target.copy_(target + values if home.valid else values)
    home.landed()


def kept(home: GradientHome) -> torch.Tensor:
    return visited(home, 0, NUMEL)


def visited(home: GradientHome, begin: int, end: int) -> torch.Tensor:
    parts = [part.clone() for part in home.visit(begin, end)]
    return torch.cat(parts[::-1] if home.tier == "nvme" else parts)


def check_squares(home: GradientHome) -> None:
    ours, plain = Squares(), torch.zeros(ops.ACCUMULATOR_ENTRIES, dtype=torch.int64)
    home.add_squares(ours)
    ops.squared_norm_(kept(home), plain)
    assert ops.squared_norm_value(ours.total()) == ops.squared_norm_value(plain) > 0


@pytest.mark.parametrize("name", sorted(HOMES))
def test_keeps_adds_and_forgets(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_shard_io, "PIECE_ELEMENTS", nvme_shard_io.GRAIN)  # the gradient has three
    pool = BufferPool(plan_pool([]))
    tiers = Tiers(OffloadPolicy(grads="nvme", nvme_paths=(str(tmp_path),)), AioPolicy(), {})
    tiers.reserve(tiers.stored_bytes("nvme", NUMEL, torch.float32))
    home = HOMES[name](pool, tiers)
    for _ in range(2):
        first, second = (torch.randn(NUMEL).bfloat16() for _ in range(2))
        assert not home.valid
        narrow = home.dtype is torch.bfloat16
        reduce_into(home, pool, first)
        assert home.valid and torch.equal(kept(home), first if narrow else first.float())
        reduce_into(home, pool, second)
        check_squares(home)
        home.settle()
        wanted = first.float() + second.float()
        assert home.dtype is torch.float32 and torch.equal(kept(home), wanted)
        assert torch.equal(home.shard().read(0, NUMEL), wanted)
        home.change(700, 4900, lambda part: part.mul_(0.5))
        wanted[700:4900] *= 0.5
        assert torch.equal(visited(home, 600, 4999), wanted[600:4999])
        assert torch.equal(kept(home), wanted)
        check_squares(home)
        home.forget()
        assert not home.valid
        assert pool.live_bytes == 0
