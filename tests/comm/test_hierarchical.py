"""Gathers that cross nodes once, groups of ranks, and the order of collectives of several phases."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import pytest
import torch

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.comm import Collectives
from zero_ext.comm.pending_collective import CollectiveOrder
from zero_ext.comm.process_group import make_collectives


def payload_of(seed: int, rank: int, number: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 100 * number + rank)
    return torch.randint(0, 256, (37,), dtype=torch.uint8, generator=generator)


def slots_with(own: torch.Tensor, rank: int, ranks: int) -> list[torch.Tensor]:
    slots = list(torch.full((ranks, own.numel()), 255, dtype=torch.uint8))
    slots[rank].copy_(own)
    return slots


def node_sizes(ranks: int) -> list[int]:
    return [size for size in range(1, ranks + 1) if ranks % size == 0]


@on_ranks(1, 2, 3, 4)
def test_a_gather_of_payloads_crosses_once(world: World) -> None:
    wanted = torch.stack([payload_of(world.seed, rank) for rank in range(world.size)])
    for size in node_sizes(world.size):
        collectives = make_collectives(world.group, 20.0, ranks_per_node=size)
        slots = slots_with(wanted[world.rank], world.rank, world.size)
        collectives.gather_payloads(slots, "gather", 5, "test").wait()
        assert torch.equal(torch.stack(slots), wanted)
        nodes = world.size // size
        traffic = collectives.traffic
        assert traffic.elements["gather"] == 5
        assert traffic.crossing_bytes["gather"] == 37 * (nodes - 1)
        assert traffic.bytes_sent["gather"] == 37 * (world.size - 1)
        for rank, slot in enumerate(slots):
            if rank not in collectives.nodes.counterparts:
                slot.fill_(255)
        collectives.gather_payloads(slots, "again", 5, "test", in_node=True).wait()
        assert torch.equal(torch.stack(slots), wanted)
        assert traffic.crossing_bytes["again"] == 0
        assert traffic.bytes_sent["again"] == 37 * nodes * (size - 1)


@on_ranks(4)
def test_flat_collectives_cross_to_every_remote_rank(world: World) -> None:
    collectives = make_collectives(world.group, 20.0, ranks_per_node=2)
    flat = torch.zeros(8)
    collectives.gather(flat, flat[:2], "gather", "test").wait()
    collectives.reduce_scatter(flat, torch.empty(2), torch.empty(6), False, "reduce", "test").wait()
    assert collectives.traffic.crossing_bytes == {"gather": 16, "reduce": 16}
    assert collectives.traffic.bytes_sent == {"gather": 24, "reduce": 24}


@on_ranks(4)
def test_phases_have_one_order_on_all_ranks(world: World) -> None:
    """Ranks wait in different orders, and some begin the next collective first."""
    collectives = make_collectives(world.group, 20.0, ranks_per_node=2)
    begun = []
    for number in range(3):
        slots = slots_with(payload_of(world.seed, world.rank, number), world.rank, world.size)
        pending = collectives.gather_payloads(slots, "gather", 5, f"test {number}")
        if number == world.rank:
            pending.wait()
        begun.append((number, slots, pending))
    flat = torch.full((4,), float(world.rank))
    collectives.gather(flat, flat[:1].clone(), "gather", "flat").wait()
    for number, slots, pending in reversed(begun) if world.rank % 2 else begun:
        pending.wait()
        wanted = [payload_of(world.seed, rank, number) for rank in range(world.size)]
        assert torch.equal(torch.stack(slots), torch.stack(wanted))
    assert flat.tolist() == [0.0, 1.0, 2.0, 3.0]


def check_group(group: Collectives, ranks: range) -> None:
    own = ranks[group.rank]
    flat = torch.full((len(ranks),), float("nan"))
    group.gather(flat, torch.tensor([float(own)]), "gather", "test").wait()
    assert flat.tolist() == list(ranks)
    assert group.sum_(torch.tensor([own]), "test").item() == sum(ranks)
    for source in range(len(ranks)):
        assert group.broadcast_(torch.tensor([own]), source, "test").item() == ranks[source]
    out, received = torch.empty(1), torch.empty(len(ranks) - 1)
    full = torch.arange(len(ranks)) * 1.0 + own
    group.reduce_scatter(full, out, received, False, "reduce", "test").wait()
    assert out.item() == pytest.approx(group.rank + sum(ranks) / len(ranks))


@on_ranks(4)
def test_groups_of_ranks(world: World) -> None:
    collectives = make_collectives(world.group, 20.0, ranks_per_node=2)
    first = world.rank // 2 * 2
    check_group(collectives.among(range(first, first + 2)), range(first, first + 2))
    assert not any(collectives.traffic.crossing_bytes.values())
    check_group(collectives.among(range(world.rank % 2, 4, 2)), range(world.rank % 2, 4, 2))
    assert collectives.traffic.crossing_bytes["gather"] == 4


@on_ranks(2, 3, stand_in=True)
def test_payloads_of_a_device_go_through_host_memory(world: World) -> None:
    """Also where a rank has no peer in a phase."""
    device = torch.device("stand_in:0")
    wanted = torch.stack([payload_of(world.seed, rank) for rank in range(world.size)])
    for size in node_sizes(world.size):
        collectives = make_collectives(world.group, 20.0, device, ranks_per_node=size)
        slots = list(torch.full((world.size, 37), 255, dtype=torch.uint8, device=device))
        slots[world.rank].copy_(wanted[world.rank])
        for in_node in (False, True):
            collectives.gather_payloads(slots, "gather", 5, "test", in_node=in_node).wait()
            assert torch.equal(torch.stack([slot.cpu() for slot in slots]), wanted)


def test_a_chain_continues_in_its_own_stream() -> None:
    """Not in the stream of that, which needs none of its results."""
    stream = ["the caller's"]
    done: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def beside() -> Iterator[None]:
        stream.append("another")
        yield
        stream.pop()

    class Work:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait(self) -> None:
            done.append((f"wait for {self.name}", stream[-1]))

    def phase(name: str) -> list[Work]:
        done.append((f"begin {name}", stream[-1]))
        return [Work(name)]

    order = CollectiveOrder()
    order.beside = beside
    (chain,) = order.chain([functools.partial(phase, "first"), functools.partial(phase, "second")])
    order.follow()
    order.follow()
    chain.wait()
    assert done == [
        ("begin first", "the caller's"),
        ("wait for first", "another"),
        ("begin second", "another"),
        ("wait for second", "the caller's"),
    ]
