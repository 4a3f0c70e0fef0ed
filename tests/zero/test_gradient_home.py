"""Homes of reduced gradients, one by one, against plain sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from zero_ext.offload import TransferLog
from zero_ext.zero.gradient_home import BorrowedGradients, GradientHome, MemoryGradients
from zero_ext.zero.pool import BufferPool

NUMEL = 5000
Make = Callable[[BufferPool, TransferLog], GradientHome]


def memory(tier: str) -> Make:
    def make(pool: BufferPool, transfers: TransferLog) -> GradientHome:
        tensor = torch.full((NUMEL,), float("nan"), dtype=torch.bfloat16)
        return MemoryGradients(tier, tensor, torch.float32, pool, transfers)  # type: ignore[arg-type]

    return make


def borrowed(pool: BufferPool, transfers: TransferLog) -> GradientHome:
    return BorrowedGradients(NUMEL, torch.bfloat16, torch.float32, pool, transfers)


HOMES: dict[str, Make] = {"device": memory("device"), "host": memory("host"), "borrowed": borrowed}


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
    return torch.cat([part.clone() for part in home.visit(0, NUMEL)])


@pytest.mark.parametrize("name", sorted(HOMES))
def test_keeps_adds_and_forgets(name: str) -> None:
    pool, transfers = BufferPool(), TransferLog()
    home = HOMES[name](pool, transfers)
    for _ in range(2):
        first, second = (torch.randn(NUMEL).bfloat16() for _ in range(2))
        assert not home.valid
        narrow = home.dtype is torch.bfloat16
        reduce_into(home, pool, first)
        assert home.valid and torch.equal(kept(home), first if narrow else first.float())
        reduce_into(home, pool, second)
        wanted = first.float() + second.float()
        assert home.dtype is torch.float32 and torch.equal(kept(home), wanted)
        assert torch.equal(home.shard().read(0, NUMEL), wanted)
        home.change(700, 4900, lambda part: part.mul_(0.5))
        wanted[700:4900] *= 0.5
        assert torch.equal(torch.cat([part.clone() for part in home.visit(600, 4999)]), wanted[600:4999])
        home.forget()
        assert not home.valid
        assert pool.live_bytes == 0
