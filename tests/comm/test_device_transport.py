"""Collectives over a device's backend: what they ask NCCL for and make of its answers.

These tests do not run NCCL itself. A fake stands in for it, so they say nothing about its
streams or speed.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.comm.fake_backend import FakeBackend
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.comm import Collectives, DeviceDispatch, DeviceTransport, TrafficStats
from zero_ext.comm.process_group import CPU, join_world, make_collectives
from zero_ext.config.communication import ResolvedReduction

CUDA = torch.device("cuda", 0)


def values_of(seed: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def over_fake(world: World, reduction: ResolvedReduction = "rank_order") -> tuple[Collectives, FakeBackend]:
    backend = FakeBackend(world.group)
    transport = DeviceTransport(backend)
    made = Collectives(transport, transport, TrafficStats(), reduction=reduction, in_one_order=True)
    return made, backend


@on_ranks(2, 3)
def test_gather_and_broadcast_are_the_backends_own(world: World) -> None:
    collectives, backend = over_fake(world)
    flat = torch.full((5 * world.size,), float("nan"))
    collectives.gather(flat, values_of(world.seed, world.rank, 5, flat.dtype), "gather", "test").wait()
    assert torch.equal(
        flat, torch.cat([values_of(world.seed, rank, 5, flat.dtype) for rank in range(world.size)])
    )
    value = torch.tensor([float(world.rank)])
    assert collectives.broadcast_(value, 1, "test").item() == 1
    assert backend.calls == [("allgather", 5 * world.size, torch.float32), ("broadcast", 1, 1)]
    assert collectives.traffic.bytes_sent["gather"] == 5 * 4 * (world.size - 1)


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sums", [False, True])
def test_gradients_are_added_in_rank_order_unless_the_backend_is_to(
    world: World, dtype: str, sums: bool
) -> None:
    collectives, reductions = over_fake(world, "backend" if sums else "rank_order")
    numel, kind = 9, getattr(torch, dtype)
    flats = [values_of(world.seed, rank, numel * world.size, kind) for rank in range(world.size)]
    total = torch.zeros(numel * world.size)
    for one in flats:
        total += one.float()
    mean = (total / world.size).chunk(world.size)[world.rank]
    received = torch.full((numel * (1 if sums else world.size - 1),), float("nan"), dtype=kind)
    out, base = torch.full((numel,), float("nan")), torch.ones(numel)
    for target, accumulate in ((out, False), (base, True)):
        flat = flats[world.rank].clone()
        collectives.reduce_scatter(flat, target, received, accumulate, "reduce_scatter", "test").wait()
    if sums:
        rounding = torch.finfo(kind).eps * world.size
        torch.testing.assert_close(out, mean, rtol=rounding, atol=2 * rounding)
        torch.testing.assert_close(base, 1 + out)
        assert reductions.calls == [("reduce_scatter", numel, kind)] * 2
    else:
        torch.testing.assert_close(out, mean, rtol=1e-6, atol=0)
        torch.testing.assert_close(base, 1 + mean, rtol=1e-6, atol=1e-6)
        sizes = [numel * (rank != world.rank) for rank in range(world.size)]
        assert reductions.calls == [("alltoall", sizes, sizes)] * 2
    assert collectives.traffic.bytes_sent["reduce_scatter"] == 2 * numel * kind.itemsize * (world.size - 1)


@on_ranks(2)
def test_an_aborted_rank_starts_nothing_more(world: World) -> None:
    collectives, backend = over_fake(world)
    collectives.abort("rank 0: the disk is gone")
    assert backend.aborted
    with pytest.raises(RuntimeError, match="the disk is gone"):
        collectives.gather(torch.empty(4), torch.empty(2), "gather", "test")
    assert not backend.calls
    del collectives
    gc.collect()
    assert not backend.shut_down  # it is aborted


@on_ranks(2)
def test_connections_end_with_the_collectives(world: World) -> None:
    collectives, backend = over_fake(world)
    assert not backend.shut_down
    del collectives
    gc.collect()
    assert backend.shut_down and not backend.aborted


class Elsewhere(torch.Tensor):
    """A tensor that claims to be on CUDA."""

    device = CUDA  # type: ignore[assignment]


class Options:
    _timeout: timedelta


def made_nccl(seen: list[dict[str, Any]], group: Any) -> Any:
    """What stands for ``ProcessGroupNCCL``: notes how it is made."""

    def make(store: Any, rank: int, size: int, options: Options) -> FakeBackend:
        backend = FakeBackend(group)
        seen.append({"timeout": options._timeout.total_seconds(), "backend": backend})
        return backend

    make.Options = Options  # type: ignore[attr-defined]
    return make


@contextlib.contextmanager
def pretending(offered: str, make: Any) -> Iterator[None]:
    """The caller's group offers other backends than it has, and NCCL is what ``make`` makes."""
    with (
        mock.patch.object(dist, "get_backend_config", lambda group: offered),
        mock.patch.object(dist, "ProcessGroupNCCL", make, create=True),
        mock.patch.object(DeviceTransport, "connect", lambda transport, device: None),
    ):
        yield


@pytest.mark.parametrize("offered", ["cpu:gloo,cuda:nccl", "cuda:nccl"])
@on_ranks(2)
def test_a_cuda_model_gets_its_own_nccl_alongside_the_host_transport(world: World, offered: str) -> None:
    seen: list[dict[str, Any]] = []
    with pretending(offered, made_nccl(seen, world.group)):
        collectives = make_collectives(world.group, 20.0, CUDA, reduction="backend")
    # One set of connections: NCCL's would have to be used in one order on all ranks otherwise.
    assert [each["timeout"] for each in seen] == [20.0]
    assert collectives.in_one_order and collectives.reduction == "backend"
    calls = seen[0]["backend"].calls
    assert isinstance(collectives._gathers.unordered, DeviceDispatch)
    # What is on the device goes to NCCL, small agreements of the host do not.
    total = torch.ones(3).as_subclass(Elsewhere)
    collectives.sum_(total, "test")
    assert calls == [("allreduce", 3, torch.float32)] and total.tolist() == [2.0] * 3
    assert collectives.sum_(torch.ones(1), "test").item() == 2.0
    assert collectives.broadcast_(torch.ones(1), 0, "test").item() == 1.0
    assert len(calls) == 1


@on_ranks(2)
def test_another_backend_is_made_as_it_was_registered(world: World) -> None:
    seen: list[tuple[int, int, float]] = []

    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> FakeBackend:
        seen.append((rank, size, timeout.total_seconds()))
        return FakeBackend(world.group)

    def make_extended(arguments: Any, options: object) -> FakeBackend:
        seen.append((arguments.group_rank, arguments.group_size, arguments.timeout.total_seconds()))
        assert options is None and list(arguments.global_ranks_in_group) == [0, 1]
        return FakeBackend(world.group)

    for extended, maker in ((False, make), (True, make_extended)):
        plugins = {"CARRIER": dist.Backend._BackendPlugin(maker, extended)}
        with mock.patch.object(dist.Backend, "_plugins", plugins), pretending("cuda:carrier", None):
            collectives = make_collectives(world.group, 9.0, CUDA)
        assert collectives.in_one_order and collectives.reduction == "rank_order"
    assert seen == [(world.rank, 2, 9.0)] * 2


MIXED = [
    # Device and backends of rank 0 and of rank 1, and what both ranks raise.
    ((CUDA, "cuda:nccl"), (CPU, "cuda:nccl"), r"got cuda over nccl on rank 0, cpu on rank 1\. Move"),
    (
        (CUDA, "cuda:nccl"),
        (CUDA, "cpu:gloo"),
        r"on rank 0, cuda over host memory on rank 1",
    ),
    (
        (CUDA, "cuda:mpi"),
        (CUDA, "cuda:mpi"),
        r"ranks 0, 1: process_group: expected .* got 'mpi' for",
    ),
    ((CUDA, "cuda:nccl"), (CUDA, "cuda:ucc"), r"^rank 1: process_group: expected .* got 'ucc' for cuda"),
]


@pytest.mark.parametrize("case", range(len(MIXED)))
@on_ranks(2)
def test_ranks_that_cannot_be_connected_are_refused_on_all(world: World, case: int) -> None:
    *arguments, message = MIXED[case]
    device, offered = arguments[world.rank]
    seen: list[dict[str, Any]] = []
    with pretending(offered, made_nccl(seen, world.group)), pytest.raises(ValueError, match=message):
        make_collectives(world.group, 20.0, device)
    assert not seen


@pytest.mark.parametrize("where", ["made", "connected"])
@on_ranks(2)
def test_connections_that_do_not_form_on_one_rank_are_an_error_on_all(world: World, where: str) -> None:
    seen: list[dict[str, Any]] = []
    make = made_nccl(seen, world.group)

    def fails(*_: Any) -> None:
        if world.rank == 1:
            raise RuntimeError("Duplicate GPU detected")

    def made(*arguments: Any) -> Any:
        fails()
        return make(*arguments)

    made.Options = Options  # type: ignore[attr-defined]
    with pretending("cuda:nccl", made if where == "made" else make):
        connect = fails if where == "connected" else lambda transport, device: None
        message = r"^rank 1: cuda over nccl: .* did not form: Duplicate GPU"
        with (
            mock.patch.object(DeviceTransport, "connect", connect),
            pytest.raises(RuntimeError, match=message),
        ):
            make_collectives(world.group, 20.0, CUDA)
    assert all(each["backend"].aborted for each in seen)
    assert len(seen) == (1 if where == "connected" or world.rank == 0 else 0)


@pytest.mark.parametrize(("cuda", "backend"), [(True, "cpu:gloo,cuda:nccl"), (False, "gloo")])
def test_a_launchers_world_starts_with_nccl_where_there_is_cuda(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, backend: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCH_NCCL_NAN_CHECK", "")
    monkeypatch.delenv("TORCH_NCCL_NAN_CHECK")
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    seen: list[str | None] = []
    started = mock.Mock(side_effect=lambda *_, **__: seen.append(os.environ.get("TORCH_NCCL_NAN_CHECK")))
    monkeypatch.setattr(dist, "init_process_group", started)
    join_world(7.0)
    started.assert_called_once_with(backend, timeout=timedelta(seconds=7))
    # The world is its user's as well, who may well reduce a metric that is NaN.
    assert seen == [None]
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
