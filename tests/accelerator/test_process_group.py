"""The stand-in's collectives: results late, in order, and refused where NCCL refuses or hangs."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.accelerator.stand_in import BACKEND
from tests.multi.on_ranks import on_ranks
from tests.multi.pool import RankPool
from tests.multi.rank import World

DTYPES = ["float32", "bfloat16", "float16", "float64", "int64", "uint8"]
NUMEL = 60  # divided by any number of ranks here


def group(world: World, name: str = "", seconds: float = 60.0) -> Any:
    """A communicator of the world's ranks for one test, or several with names."""
    store = dist.PrefixStore(f"test {world.seed} {name}", world.group.get_group_store())
    return dist.Backend._plugins[BACKEND.upper()].creator_fn(
        store, world.rank, world.size, datetime.timedelta(seconds=seconds)
    )


def values(world: World, rank: int, dtype: str = "float32", numel: int = NUMEL) -> torch.Tensor:
    generator = torch.Generator().manual_seed(world.seed + rank)
    return (10 * torch.randn(numel, generator=generator)).abs().to(getattr(torch, dtype))


def in_ring(inputs: list[torch.Tensor]) -> torch.Tensor:
    """What a ring of ranks adds up to: slice k from rank k + 1 on, rounded at each rank."""
    size = len(inputs)
    slices = []
    for slice_ in range(size):
        begin, end = NUMEL * slice_ // size, NUMEL * (slice_ + 1) // size
        total = inputs[(slice_ + 1) % size][begin:end].clone()
        for step in range(2, size + 1):
            total = total + inputs[(slice_ + step) % size][begin:end]
        slices.append(total)
    return torch.cat(slices)


@pytest.mark.parametrize("dtype", DTYPES)
@on_ranks(2, 3, stand_in=True)
def test_every_collective(world: World, dtype: str) -> None:
    rank, size, pg = world.rank, world.size, group(world)
    inputs = [values(world, each, dtype) for each in range(size)]
    own = inputs[rank].to("stand_in")
    summed = own.clone()
    gathered = torch.empty(size * NUMEL, dtype=own.dtype, device="stand_in")
    scattered = torch.empty(NUMEL // size, dtype=own.dtype, device="stand_in")
    swapped = torch.empty_like(own)
    sent = torch.empty(NUMEL, dtype=own.dtype, device="stand_in") if rank else own.clone()
    for work in (
        pg.allreduce([summed]),
        pg._allgather_base(gathered, own),
        pg._reduce_scatter_base(scattered, own),
        pg.alltoall_base(swapped, own, [], []),
        pg.broadcast(sent, 0),
    ):
        work.wait()
    ring = in_ring(inputs)
    assert torch.equal(summed.cpu(), ring)
    assert torch.equal(gathered.cpu(), torch.cat(inputs))
    assert torch.equal(scattered.cpu(), ring.chunk(size)[rank])
    assert torch.equal(swapped.cpu(), torch.cat([each.chunk(size)[rank] for each in inputs]))
    assert torch.equal(sent.cpu(), inputs[0])
    least = own.clone()
    pg.allreduce([least], dist.ReduceOp.MIN).wait()
    assert torch.equal(least.cpu(), torch.stack(inputs).amin(0))
    pg.shutdown()


@on_ranks(3, stand_in=True)
def test_splits_pairs_and_factors(world: World) -> None:
    rank, size, pg = world.rank, world.size, group(world)
    chunks = [
        [values(world, 10 * a + b, numel=(a + 2 * b) % 4 * 100_000) for b in range(size)] for a in range(size)
    ]
    outputs = [torch.empty_like(chunks[a][rank], device="stand_in") for a in range(size)]
    pg.alltoall(outputs, [chunk.to("stand_in") for chunk in chunks[rank]]).wait()
    for a in range(size):
        assert torch.equal(outputs[a].cpu(), chunks[a][rank])
    received = torch.empty(NUMEL, device="stand_in")
    pg._start_coalescing()  # a ring: without a group it would be a deadlock
    pg.send([values(world, rank).to("stand_in")], (rank + 1) % size, 0)
    pg.recv([received], (rank - 1) % size, 0)
    pg._end_coalescing().wait()
    assert torch.equal(received.cpu(), values(world, (rank - 1) % size))
    averaged = values(world, rank).to("stand_in")
    pg.allreduce([averaged], dist.ReduceOp.AVG).wait()
    assert torch.equal(averaged.cpu(), in_ring([values(world, each) * (1 / 3) for each in range(size)]))
    pg.barrier().wait()


@on_ranks(2, stand_in=True)
def test_without_a_wait_there_is_poison(world: World) -> None:
    torch.stand_in.set_schedule("lazy", world.seed)
    pg = group(world)
    pg.allreduce([on(1)]).wait()
    own, gathered = values(world, world.rank).to("stand_in"), torch.zeros(2 * NUMEL, device="stand_in")
    summed = own.clone()
    if world.rank:
        world.barrier()  # until the other rank has seen what is there before this one comes
    works = [pg._allgather_base(gathered, own), pg.allreduce([summed])]
    if not world.rank:
        assert gathered.isnan().all() and summed.isnan().all() and not own.isnan().any()
        assert not works[0].is_completed()
        world.barrier()
    for work in works:
        work.wait()
    assert torch.equal(gathered.cpu(), torch.cat([values(world, 0), values(world, 1)]))
    assert torch.equal(summed.cpu(), in_ring([values(world, 0), values(world, 1)]))


@on_ranks(2, stand_in=True)
def test_what_is_sent_is_read_late(world: World) -> None:
    torch.stand_in.set_schedule("lazy", world.seed)
    pg = group(world)
    own, gathered = on(NUMEL), torch.zeros(2 * NUMEL, device="stand_in")
    pg.allreduce([on(1)]).wait()
    if world.rank:
        world.barrier()
    work = pg._allgather_base(gathered, own)
    if not world.rank:
        own.fill_(8.0)  # too early
        world.barrier()
    work.wait()
    assert torch.equal(gathered.cpu(), torch.tensor([8.0, 1.0]).repeat_interleave(NUMEL))


REFUSED = {
    "a host tensor": (
        lambda pg: pg.allreduce([torch.ones(4)]),
        "expected a tensor on the stand_in device, got cpu",
    ),
    "strides": (lambda pg: pg.allreduce([on(4, 4).t()]), "expected a contiguous tensor"),
    "sizes": (lambda pg: pg._allgather_base(on(7), on(4)), "7 elements are not those of 2 ranks with 4"),
    "dtypes": (lambda pg: pg._allgather_base(on(8), on(4).long()), "dtypes Float and Long"),
    "int16": (lambda pg: pg.allreduce([on(4).short()]), "no dtype Short"),
    "bits": (lambda pg: pg.allreduce([on(4).long()], dist.ReduceOp.BOR), "cannot reduce by bits"),
    "another device": (
        lambda pg: (pg.allreduce([on(4)]), pg.allreduce([torch.ones(4, device="stand_in:1")])),
        "the communicator is on device 0, the tensor on 1",
    ),
    "itself": (lambda pg: pg.send([on(4)], pg.rank(), 0), "send to rank"),
}


def on(*size: int) -> torch.Tensor:
    return torch.ones(*size, device="stand_in")


@pytest.mark.parametrize("what", REFUSED)
@on_ranks(2, stand_in=True)
def test_what_nccl_refuses(world: World, what: str) -> None:
    call, message = REFUSED[what]
    with pytest.raises(RuntimeError, match=message):
        call(group(world))
    torch.accelerator.synchronize()


MISMATCHED = {
    "op": (
        lambda pg: pg.allreduce([on(4)]),
        lambda pg: pg.broadcast(on(4), 0),
        "broadcast of 4 x Float from 0",
    ),
    "count": (
        lambda pg: pg.allreduce([on(4)]),
        lambda pg: pg.allreduce([on(5)]),
        "all_reduce of 5 x Float, sum",
    ),
    "dtype": (lambda pg: pg.allreduce([on(4)]), lambda pg: pg.allreduce([on(4).half()]), "4 x Half, sum"),
    "reduction": (
        lambda pg: pg.allreduce([on(4)]),
        lambda pg: pg.allreduce([on(4)], dist.ReduceOp.MAX),
        "4 x Float, max",
    ),
    "root": (lambda pg: pg.broadcast(on(4), 0), lambda pg: pg.broadcast(on(4), 1), "Float from 1"),
    "splits": (
        lambda pg: pg.alltoall_base(on(4), on(4), [2, 2], [2, 2]),
        lambda pg: pg.alltoall_base(on(4), on(4), [3, 1], [3, 1]),
        "all_to_all of Float",
    ),
    "transfer": (
        lambda pg: pg.send([on(4)], 1, 0),
        lambda pg: pg.recv([on(3)], 0, 0),
        "receive of 3 x Float from 0 to 1",
    ),
}


def read_until_it_fails(pg: Any, call: Any) -> None:
    """The report is there at the launch, at the wait, or where the host looks at what was to come."""
    work = call(pg)
    work.wait()
    torch.accelerator.synchronize()


@pytest.mark.parametrize("what", MISMATCHED)
@on_ranks(2, stand_in=True)
def test_different_works_are_named_on_both_ranks(world: World, what: str) -> None:
    first, second, message = MISMATCHED[what]
    pg = group(world)
    began = time.monotonic()
    with pytest.raises(
        RuntimeError, match=f"different works as number 1.*{message}|{message}.*number 1"
    ) as caught:
        read_until_it_fails(pg, (first, second)[world.rank])
    assert "rank 0 of communicator" in str(caught.value) and "rank 1 of communicator" in str(caught.value)
    with pytest.raises(RuntimeError, match="different works"):
        pg.allreduce([on(4)])
    assert time.monotonic() - began < 30  # far from the time-out
    pg.abort()
    drop_failures()


def drop_failures() -> None:
    """Streams tell of a failure once each."""
    for _ in range(3):
        try:
            torch.accelerator.synchronize()
        except RuntimeError:
            continue
        break


@on_ranks(2, stand_in=True)
def test_two_communicators_in_two_orders_are_named(world: World) -> None:
    one, two = group(world, "one"), group(world, "two")
    for pg in (one, two):
        pg.allreduce([on(1)]).wait()
    order = (one, two) if world.rank == 0 else (two, one)
    tensors = {one: on(3), two: on(5)}
    with pytest.raises(RuntimeError, match="launched works of two communicators in different o") as caught:
        for pg in order:
            pg.allreduce([tensors[pg]]).wait()
        torch.accelerator.synchronize()
    found = str(caught.value)
    for rank, (first, then) in enumerate([(3, 5), (5, 3)]):
        assert re.search(rf"Rank {rank}: all_reduce of {first} x [^:]* before all_reduce of {then} x", found)
    for pg in (one, two):
        pg.abort()
    drop_failures()


@on_ranks(2, stand_in=True)
def test_two_communicators_in_one_order_end_in_any(world: World) -> None:
    one, two = group(world, "one"), group(world, "two")
    for step in range(30):
        first, second = (
            values(world, world.rank).to("stand_in"),
            values(world, world.rank + step).to("stand_in"),
        )
        works = [one.allreduce([first]), two.allreduce([second])]
        for work in reversed(works):
            work.wait()
        assert torch.equal(first.cpu(), in_ring([values(world, each) for each in range(2)]))
        assert torch.equal(second.cpu(), in_ring([values(world, each + step) for each in range(2)]))
    one.shutdown()
    two.shutdown()
    with pytest.raises(RuntimeError, match="has been shut down"):
        one.allreduce([on(1)])


@on_ranks(2, stand_in=True)
def test_a_peer_that_never_comes_is_a_time_out(world: World) -> None:
    pg = group(world, seconds=0.5)
    pg.allreduce([on(1)]).wait()
    torch.accelerator.synchronize()
    if world.rank == 0:
        with pytest.raises(RuntimeError, match="rank 0 waited for its peers longer than 500 ms"):
            read_until_it_fails(pg, lambda pg: pg.allreduce([on(4)]))
    world.barrier()
    pg.abort()
    drop_failures()


@on_ranks(2, stand_in=True)
def test_a_communicator_that_does_not_form_is_named_on_both_ranks(world: World) -> None:
    if world.rank == 1:
        torch.stand_in.refuse_communicators()
    try:
        with pytest.raises(RuntimeError, match="rank 1 could not form a communicator"):
            group(world).allreduce([on(4)])
    finally:
        torch.stand_in.refuse_communicators(-1)


@pytest.fixture(scope="module")
def strict_pool() -> Iterator[RankPool]:
    pool = RankPool(2, stand_in=True, backend=BACKEND)
    yield pool
    pool.close()


def default_group(world: World) -> list[Any]:
    """What torch.distributed's own functions do on a world of this backend alone."""
    assert dist.get_backend() == BACKEND
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1))
    tensor = torch.full((4,), float(world.rank), device="stand_in")
    dist.all_reduce(tensor)
    pairs = [torch.empty(4, device="stand_in"), tensor + world.rank]
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, pairs[0], 1 - world.rank), dist.P2POp(dist.isend, pairs[1], 1 - world.rank)]
    ):
        work.wait()
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": world.rank})
    messages = [f"from {world.rank}"]
    dist.broadcast_object_list(messages, src=1)
    dist.barrier()
    return [tensor.cpu(), pairs[0].cpu(), messages[0]] + [each["rank"] for each in objects]


def test_a_world_of_it_alone(strict_pool: RankPool) -> None:
    for rank, (total, received, messages, *ranks) in enumerate(
        strict_pool.run(2, f"{__name__}:default_group", {})
    ):
        assert torch.equal(total, torch.ones(4))
        assert torch.equal(received, torch.full((4,), 2.0 - rank))
        assert (messages, ranks) == ("from 1", [0, 1])
