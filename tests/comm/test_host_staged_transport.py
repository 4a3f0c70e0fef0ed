"""Transport of device tensors through host memory: values, the order of streams, fixed staging, errors."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.comm import (
    Collectives,
    DeviceDispatch,
    HostStagedTransport,
    ProcessGroupTransport,
    host_staged_transport,
)
from zero_ext.comm.process_group import make_collectives

DEVICE = "stand_in:0"


def values_of(seed: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def made(world: World, timeout: float = 20.0) -> Collectives:
    return make_collectives(world.group, timeout, torch.device(DEVICE))


def poisoned(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((numel,), float("nan"), dtype=dtype, device=DEVICE)


@on_ranks(2, 3, stand_in=True)
@pytest.mark.parametrize("schedule", ["lazy", "random"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gather_and_reduce_scatter(world: World, dtype: str, schedule: str) -> None:
    torch.stand_in.set_schedule(schedule, world.seed)  # type: ignore[attr-defined]
    kind, numel = getattr(torch, dtype), 1000
    # Several chunks, the last one shorter, and each half of the buffer is used again.
    with mock.patch.object(host_staged_transport, "STAGING_BYTES", 16384):
        collectives = made(world)
        full = [values_of(world.seed, rank, numel * world.size, kind) for rank in range(world.size)]
        flat, received = poisoned(numel * world.size, kind), poisoned(numel * (world.size - 1), kind)
        gradients, out = poisoned(numel * world.size, kind), poisoned(numel)
        for turn in range(3):
            # Written just before, and overwritten just after: the order of streams alone keeps them apart.
            shard = (full[world.rank][:numel] + turn).pin_memory().to(DEVICE, non_blocking=True)
            gathering = collectives.gather(flat, shard, "gather", "test")
            gradients.copy_(full[world.rank].pin_memory(), non_blocking=True)
            reduction = collectives.reduce_scatter(gradients, out, received, turn > 0, "reduce", "test")
            gathering.wait()
            seen = flat.clone()
            flat.fill_(float("nan"))
            reduction.wait()
            gradients.fill_(float("nan"))
            assert torch.equal(seen.cpu(), torch.cat([each[:numel] + turn for each in full]))
    total = torch.zeros(numel * world.size)
    for each in full:
        total += each.float()
    mean = (total * (1.0 / world.size)).chunk(world.size)[world.rank]
    assert torch.equal(out.cpu(), mean + mean + mean)
    assert collectives.traffic.bytes_sent["gather"] == 3 * numel * kind.itemsize * (world.size - 1)


@on_ranks(2, 3, stand_in=True)
def test_sums_and_broadcasts_go_where_the_tensor_is(world: World) -> None:
    collectives = made(world)
    gathers = collectives._gathers.unordered
    assert isinstance(gathers, DeviceDispatch) and isinstance(gathers.device, HostStagedTransport)
    assert collectives.staging_bytes == 2 * host_staged_transport.STAGING_BYTES
    total = sum(range(1, world.size + 1))
    for device in (DEVICE, "cpu"):
        mine = torch.tensor([world.rank + 1, 1], device=device)
        assert collectives.sum_(mine, "test").tolist() == [total, world.size]
        for source in range(world.size):
            value = torch.full((3,), float(world.rank), device=device)
            assert collectives.broadcast_(value, source, "test").tolist() == [float(source)] * 3


@on_ranks(2, stand_in=True)
def test_host_tensors_do_not_wait_for_the_devices(world: World) -> None:
    collectives = made(world)
    flat = torch.zeros(2, device=DEVICE)
    if world.rank == 0:
        gathering = collectives.gather(flat, torch.ones(1, device=DEVICE), "gather", "test")
        assert collectives.broadcast_(torch.zeros(1), 1, "test").item() == 1.0
    else:
        assert collectives.broadcast_(torch.ones(1), 1, "test").item() == 1.0
        gathering = collectives.gather(flat, torch.ones(1, device=DEVICE), "gather", "test")
    gathering.wait()
    assert flat.tolist() == [1.0, 1.0]


@on_ranks(2, stand_in=True)
def test_a_silent_peer_ends_the_wait_with_names(world: World) -> None:
    collectives = made(world, 5.0)
    if world.rank == 0:
        with pytest.raises(RuntimeError, match=r"rank 0: unit 'x' failed: (?s:.*)timeout_seconds"):
            collectives.broadcast_(torch.zeros(4, device=DEVICE), 1, "unit 'x'")
    world.barrier()


@on_ranks(2, stand_in=True)
def test_peers_of_an_aborted_rank_raise_its_reason(world: World) -> None:
    collectives = made(world)
    if world.rank == 0:
        collectives.abort("rank 0: the disk is gone")
    else:
        with pytest.raises(RuntimeError, match="the disk is gone"):
            collectives.broadcast_(torch.zeros(4, device=DEVICE), 0, "test")
    world.barrier()


@on_ranks(2, stand_in=True)
def test_a_group_without_a_backend_for_the_device_is_logged(world: World) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("zero_ext.comm.process_group")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        made(world)
    finally:
        logger.removeHandler(handler)
    texts = [record.getMessage() for record in records]
    if world.rank == 0:
        (text,) = texts
        assert text.startswith("the process group has no backend for stand_in:0: what the ranks exchange")


@on_ranks(2, stand_in=True)
def test_it_runs_over_gloo_too(world: World) -> None:
    transport = HostStagedTransport(ProcessGroupTransport(world.group), torch.device(DEVICE))
    flat = torch.full((2 * 5,), float(world.rank), device=DEVICE)
    for work in transport.gather(flat, 3):
        work.wait()
    assert flat.tolist() == [0.0] * 5 + [1.0] * 5
