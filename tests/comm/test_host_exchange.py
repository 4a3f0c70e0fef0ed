"""Exchange between processes of one host: what arrives, what it falls back to, what it leaves behind."""

from __future__ import annotations

import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext import ops
from zero_ext.comm import GroupExchange, HostExchange, fastest_exchange


def values(world: World, source: int, destination: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(world.seed + 100 * source + 10 * destination + number)
    dtype = (torch.float32, torch.bfloat16, torch.int64)[number % 3]
    return (100 * torch.randn(1 + 37 * number, generator=generator)).to(dtype)


@on_ranks(2, 3, 4)
def test_messages_arrive_whole_and_in_order(world: World) -> None:
    with mock.patch.object(ops, "host_exchange_open", wraps=ops.host_exchange_open) as opened:
        exchange = fastest_exchange(world.group, 20.0)
    assert isinstance(exchange, HostExchange)
    segment = Path("/dev/shm" + opened.call_args.args[1])
    assert not segment.exists(), "the segment's name must be gone once all have joined"
    peers = [rank for rank in range(world.size) if rank != world.rank]
    sends, receives, works = [], [], []
    for number in range(7):
        sends.append([(peer, values(world, world.rank, peer, number)) for peer in peers])
        receives.append([(peer, values(world, peer, world.rank, number).fill_(77)) for peer in peers])
        works += exchange.start(sends[-1], receives[-1])
    for work in works:
        work.wait()
    for number, batch in enumerate(receives):
        for peer, got in batch:
            assert torch.equal(got, values(world, peer, world.rank, number))
    total = torch.tensor([world.rank + 1])
    exchange.all_reduce(total).wait()
    assert int(total) == world.size * (world.size + 1) // 2


@on_ranks(2, 3)
def test_all_ranks_fall_back_if_one_may_not_read_another(world: World) -> None:
    refusing = world.rank == world.size - 1
    with mock.patch.object(
        ops, "host_exchange_connect", (lambda handle: False) if refusing else ops.host_exchange_connect
    ):
        assert isinstance(fastest_exchange(world.group, 20.0), GroupExchange)


@on_ranks(2)
def test_a_message_of_another_size_is_an_error_at_the_receiver(world: World) -> None:
    exchange = fastest_exchange(world.group, 20.0)
    if world.rank == 0:
        for work in exchange.start([(1, torch.zeros(4))], []):
            work.wait()
        return
    target = torch.full((5,), 3.0)
    (work,) = exchange.start([], [(0, target)])
    with pytest.raises(RuntimeError, match="rank 0 sent 16 bytes where 20 were expected"):
        work.wait()
    assert target.tolist() == [3.0] * 5


@on_ranks(2)
def test_a_message_of_another_tag_is_an_error_at_the_receiver(world: World) -> None:
    exchange = fastest_exchange(world.group, 20.0)
    if world.rank == 0:
        for work in exchange.start([(1, torch.zeros(5))], [], 3):
            work.wait()
        return
    target = torch.full((5,), 3.0)
    (work,) = exchange.start([], [(0, target)], 4)
    with pytest.raises(RuntimeError, match="rank 0 sent something else in its place"):
        work.wait()
    assert target.tolist() == [3.0] * 5


@on_ranks(2, 3)
def test_who_waits_for_a_rank_that_gave_up_raises_its_reason(world: World) -> None:
    exchange = fastest_exchange(world.group, 20.0)
    others = [rank for rank in range(world.size) if rank != world.rank]
    first, second = torch.full((5,), 1.0 + world.rank), torch.zeros(5)
    if world.rank == 0:
        exchange.start([(peer, first) for peer in others], [])
        exchange.give_up("rank 0: the disk is gone")
        for sends, receives in (([(1, second)], []), ([], [(1, second)])):
            with pytest.raises(RuntimeError, match="the disk is gone"):
                exchange.start(sends, receives)
        with pytest.raises(RuntimeError, match="the disk is gone"):
            exchange.all_reduce(torch.zeros(1))
        world.barrier()
        return
    (sent,) = exchange.start([], [(0, second)])
    sent.wait()
    assert second.tolist() == [1.0] * 5  # what came before arrives
    began = time.monotonic()
    for work in exchange.start([(0, first)], [(0, second)]):
        with pytest.raises(RuntimeError, match="rank 0: the disk is gone"):
            work.wait()
    assert time.monotonic() - began < 10 and second.tolist() == [1.0] * 5
    world.barrier()


def test_bad_arguments_are_named() -> None:
    with pytest.raises(RuntimeError, match="handle -1 is not open"):
        ops.host_exchange_send(-1, 0, torch.zeros(1), 0)
    with pytest.raises(RuntimeError, match="rank is 2 of 2"):
        ops.host_exchange_open(-2, "/zero_ext-never", 2, 2, False)
    with pytest.raises(RuntimeError, match=r"zero_ext-never.*No such file"):
        ops.host_exchange_open(-2, "/zero_ext-never", 1, 2, False)
    with pytest.raises(RuntimeError, match="contiguous"):
        ops.host_exchange_receive(-1, 0, torch.zeros(4, 4).t(), 0)
