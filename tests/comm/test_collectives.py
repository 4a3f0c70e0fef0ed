"""Gather, reduce-scatter, sum and broadcast of flat buffers, against plain arithmetic; errors by name."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from tests.multi.on_ranks import on_ranks
from tests.multi.pool import RankFailure, RankPool
from tests.multi.rank import World
from zero_ext.comm.flight_recorder import FlightRecorder
from zero_ext.comm.pending_collective import CollectiveOrder, PendingCollective
from zero_ext.comm.process_group import make_collectives


def values_of(seed: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + rank)
    return torch.randn(numel, generator=generator).to(dtype)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gather(world: World, dtype: str) -> None:
    collectives = make_collectives(world.group, 20.0)
    numel = 7
    for in_place in (False, True):
        flat = torch.full((numel * world.size,), float("nan"), dtype=getattr(torch, dtype))
        own = values_of(world.seed, world.rank, numel, flat.dtype)
        shard = flat[world.rank * numel : (world.rank + 1) * numel].copy_(own) if in_place else own
        collectives.gather(flat, shard, "gather", "test").wait()
        wanted = torch.cat([values_of(world.seed, rank, numel, flat.dtype) for rank in range(world.size)])
        assert torch.equal(flat, wanted)


@on_ranks(1, 2, 3, 4, by_turns=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "ranges", [[(0, 1)], [(1, 3), (5, 6)], [(0, 0)], [(2, 20), (21, 23)], [(6, 8), (9, 10), (11, 12)], []]
)
def test_gather_of_ranges(world: World, dtype: str, ranges: list[tuple[int, int]]) -> None:
    collectives = make_collectives(world.group, 20.0)
    kind, numel = getattr(torch, dtype), 24
    expected = values_of(world.seed, 0, numel, kind)
    each = numel // world.size
    own = slice(world.rank * each, (world.rank + 1) * each)
    flat = torch.full((numel,), float("nan"), dtype=kind)
    flat[own] = expected[own]
    inside = torch.zeros(numel, dtype=torch.bool)
    for begin, end in ranges:
        inside[begin:end] = True
    collectives.gather_ranges(flat, ranges, "gather", "test").wait()
    assert torch.equal(flat[inside], expected[inside])
    inside[own] = True
    assert flat[~inside].isnan().all()
    sent = sum(world.everyone(collectives.traffic.bytes_sent["gather"]))
    elements = sum(end - begin for begin, end in ranges)
    assert collectives.traffic.elements["gather"] == elements
    assert sent == (world.size - 1) * elements * kind.itemsize


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_reduce_scatter_averages_in_rank_order_and_fp32(world: World, dtype: str) -> None:
    collectives = make_collectives(world.group, 20.0)
    numel, kind = 9, getattr(torch, dtype)
    flats = [values_of(world.seed, rank, numel * world.size, kind) for rank in range(world.size)]
    total = torch.zeros(numel * world.size)
    for one in flats:
        total += one.float()
    mean = (total * (1.0 / world.size))[world.rank * numel : (world.rank + 1) * numel]
    received = torch.full((numel * (world.size - 1),), float("nan"), dtype=kind)
    for out_kind in {kind, torch.float32}:
        out = torch.full((numel,), float("nan"), dtype=out_kind)
        collectives.reduce_scatter(
            flats[world.rank].clone(), out, received, False, "reduce_scatter", "test"
        ).wait()
        assert torch.equal(out, mean.to(out_kind))
    base = torch.ones(numel)
    collectives.reduce_scatter(
        flats[world.rank].clone(), base, received, True, "reduce_scatter", "test"
    ).wait()
    torch.testing.assert_close(base, 1 + mean, rtol=1e-6, atol=1e-6)
    flat = flats[world.rank].clone()
    own = flat[world.rank * numel : (world.rank + 1) * numel]
    collectives.reduce_scatter(flat, own, received, False, "reduce_scatter", "test").wait()
    assert torch.equal(own, mean.to(kind))


@on_ranks(1, 2, 3)
def test_sum_and_broadcast(world: World) -> None:
    collectives = make_collectives(world.group, 20.0)
    assert collectives.sum_(torch.tensor([world.rank, 1]), "test").tolist() == [
        sum(range(world.size)),
        world.size,
    ]
    for source in range(world.size):
        value = torch.tensor([float(world.rank)])
        assert collectives.broadcast_(value, source, "test").item() == source


@on_ranks(2)
def test_gathers_and_reductions_may_run_in_another_order_on_each_rank(world: World) -> None:
    collectives = make_collectives(world.group, 20.0)
    flat, shard = torch.empty(4), torch.full((2,), float(world.rank))
    full, out, received = torch.full((4,), float(world.rank + 1)), torch.empty(2), torch.empty(2)
    if world.rank:
        reduction = collectives.reduce_scatter(full, out, received, False, "reduce_scatter", "test")
        gather = collectives.gather(flat, shard, "gather", "test")
        gather.wait()
        reduction.wait()
    else:
        collectives.gather(flat, shard, "gather", "test").wait()
        collectives.reduce_scatter(full, out, received, False, "reduce_scatter", "test").wait()
    assert flat.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert out.tolist() == [1.5, 1.5]


@on_ranks(2)
def test_groups_may_overlap_in_any_number(world: World) -> None:
    """A rank that belongs to more groups than its peer still finds it."""
    import torch.distributed as dist

    if world.rank == 0:
        alone = dist.new_group([0], use_local_synchronization=True)
        assert make_collectives(alone, 20.0).world_size == 1
    total = make_collectives(world.group, 20.0).sum_(torch.ones(1), "test")
    assert total.item() == 2.0


@on_ranks(2)
def test_a_silent_peer_ends_the_wait_with_names(world: World) -> None:
    collectives = make_collectives(world.group, 1.0)
    if world.rank == 0:
        with pytest.raises(
            RuntimeError, match=r"rank 0: gather of unit 'x' failed: .*(?s:.*)timeout_seconds"
        ):
            collectives.gather(torch.empty(4), torch.empty(2), "gather", "gather of unit 'x'").wait()
    world.barrier()


def gather_after_death(world: World) -> None:
    collectives = make_collectives(world.group, 20.0)
    collectives.sum_(torch.ones(1), "warm-up")
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 0: gather of unit 'x' failed.*A peer rank has died"):
        collectives.gather(torch.empty(4), torch.empty(2), "gather", "gather of unit 'x'").wait()
    assert time.monotonic() - began < 20.0
    raise ValueError("rank 0 saw the death")


def test_a_dead_peer_is_an_error_at_once() -> None:
    pool = RankPool(2)
    try:
        with pytest.raises(RankFailure, match=r"rank 0 saw the death(?s:.*)rank 1 ---\nthe process died"):
            pool.run(2, f"{__name__}:gather_after_death", {})
    finally:
        pool.close()


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", ["int64", "int32", "float32", "float64"])
def test_sums_are_added_in_rank_order_at_any_size(world: World, dtype: str) -> None:
    collectives = make_collectives(world.group, 20.0)
    kind = getattr(torch, dtype)
    for shape in ((), (1,), (5, 3), (70001,), (3, 0)):
        tensors = [
            (100 * torch.randn(shape)).to(kind) for _ in range(world.size)
        ]  # seeded alike on all ranks
        wanted = tensors[0].clone()
        for tensor in tensors[1:]:
            wanted += tensor
        own = tensors[world.rank]
        assert collectives.sum_(own, "test") is own and torch.equal(own, wanted)


@on_ranks(2)
@pytest.mark.parametrize("sizes", [[3, 3], [3, 5], [20000, 3], [20000, 30000]])
def test_different_sums_are_an_error_on_both_ranks(world: World, sizes: list[int]) -> None:
    collectives = make_collectives(world.group, 20.0)
    label = ("agreement on cats", "agreement on dogs")[world.rank]
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=f"rank {world.rank}: {label}"):
        collectives.sum_(torch.ones(sizes[world.rank]), label)
    assert time.monotonic() - began < 5
    world.barrier()


def test_a_local_step_that_fails_raises_in_every_wait() -> None:
    calls: list[int] = []

    def finish() -> None:
        calls.append(1)
        raise MemoryError("no memory for the sum")

    order = CollectiveOrder()
    recorder = FlightRecorder(0, None)
    recorded = (recorder, recorder.channel("gathers", (0,)).begin("gather of 'a'"))
    pending = PendingCollective("gather of 'a'", 0, recorded, order, tuple, finish)
    for _ in range(2):
        with pytest.raises(MemoryError, match="no memory for the sum"):
            pending.wait()
    assert calls == [1]
