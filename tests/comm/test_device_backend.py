"""Collectives over a device's backend: what they ask NCCL for and make of its answers.

NCCL itself has not run here: a fake takes its place, so these say nothing about its streams or its speed.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zero_ext
from tests.comm.fake_backend import FakeBackend
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.comm import BackendExchange, Collectives, ExchangeByDevice, WireLog
from zero_ext.comm.process_group import join_world, make_collectives
from zero_ext.zero import engine_of

CUDA = torch.device("cuda", 0)


def values_of(seed: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def over_fakes(world: World, sums: bool) -> tuple[Collectives, FakeBackend, FakeBackend]:
    gathers, reductions = FakeBackend(world.group), FakeBackend(world.group)
    exchanges = BackendExchange(gathers, False), BackendExchange(reductions, sums)
    return Collectives(world.rank, world.size, *exchanges, WireLog()), gathers, reductions


@on_ranks(2, 3)
def test_gather_and_broadcast_are_the_backends_own(world: World) -> None:
    collectives, gathers, _ = over_fakes(world, False)
    flat = torch.full((5 * world.size,), float("nan"))
    collectives.gather(flat, values_of(world.seed, world.rank, 5, flat.dtype), "gather", "test").wait()
    assert torch.equal(
        flat, torch.cat([values_of(world.seed, rank, 5, flat.dtype) for rank in range(world.size)])
    )
    value = torch.tensor([float(world.rank)])
    assert collectives.broadcast_(value, 1, "test").item() == 1
    assert gathers.calls == [("allgather", 5 * world.size, torch.float32), ("broadcast", 1, 1)]
    assert collectives.wire.bytes_sent["gather"] == 5 * 4 * (world.size - 1)


@on_ranks(2)
def test_gradients_are_looked_at_where_nobody_checks_for_nan(world: World) -> None:
    """NCCL ends the process over NaN in a gather of parameters; gradients may have some, and users look."""
    model = torch.nn.Linear(6, 5)
    model, _ = zero_ext.prepare(
        model, torch.optim.AdamW(model.parameters()), {"stage": 3}, process_group=world.group
    )
    engine = engine_of(model)
    engine.collectives, gathers, reductions = over_fakes(world, False)
    unit = engine.units[0]
    with mock.patch.object(unit, "collectives", engine.collectives):
        (model(torch.ones(2, 6)).sum() * float("nan")).backward()
        gathers.calls.clear()
        reductions.calls.clear()
        gradient = zero_ext.full_gradient(model.weight)
    assert gradient is not None and gradient.isnan().all()
    assert [call[0] for call in reductions.calls][-1] == "allgather" and not gathers.calls


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sums", [False, True])
def test_gradients_are_added_in_rank_order_unless_the_backend_is_to(
    world: World, dtype: str, sums: bool
) -> None:
    collectives, _, reductions = over_fakes(world, sums)
    numel, kind = 9, getattr(torch, dtype)
    flats = [values_of(world.seed, rank, numel * world.size, kind) for rank in range(world.size)]
    total = torch.zeros(numel * world.size)
    for one in flats:
        total += one.float()
    mean = (total / world.size).chunk(world.size)[world.rank]
    received = torch.full((numel * (world.size - 1),), float("nan"), dtype=kind)
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
    assert collectives.wire.bytes_sent["reduce_scatter"] == 2 * numel * kind.itemsize * (world.size - 1)


@on_ranks(2)
def test_who_gave_up_starts_nothing_more(world: World) -> None:
    collectives, gathers, _ = over_fakes(world, False)
    collectives.give_up("rank 0: the disk is gone")
    assert gathers.aborted
    with pytest.raises(RuntimeError, match="the disk is gone"):
        collectives.gather(torch.empty(4), torch.empty(2), "gather", "test")
    assert not gathers.calls


class Elsewhere(torch.Tensor):
    """Says that it lies on CUDA."""

    device = CUDA  # type: ignore[assignment]


class Options:
    _timeout: timedelta


def made_nccl(seen: list[dict[str, Any]], group: Any) -> Any:
    """What stands for ``ProcessGroupNCCL``: notes how it is made."""

    def make(store: Any, rank: int, size: int, options: Options) -> FakeBackend:
        backend = FakeBackend(group)
        seen.append(
            {
                "timeout": options._timeout.total_seconds(),
                "nan": os.environ.get("TORCH_NCCL_NAN_CHECK"),
                "backend": backend,
            }
        )
        return backend

    make.Options = Options  # type: ignore[attr-defined]
    return make


@pytest.mark.parametrize("offered", ["cpu:gloo,cuda:nccl", "cuda:nccl"])
@on_ranks(2)
def test_a_cuda_model_gets_nccl_of_its_own_beside_the_hosts_way(world: World, offered: str) -> None:
    seen: list[dict[str, Any]] = []
    with (
        mock.patch.object(dist, "get_backend_config", lambda group: offered),
        mock.patch.object(dist, "ProcessGroupNCCL", made_nccl(seen, world.group), create=True),
    ):
        os.environ.pop("TORCH_NCCL_NAN_CHECK", None)
        collectives = make_collectives(world.group, 20.0, CUDA, reduction="backend", checks_nan=True)
    assert "TORCH_NCCL_NAN_CHECK" not in os.environ
    assert [(each["timeout"], each["nan"]) for each in seen] == [(20.0, "1"), (20.0, "0")]
    gathers, reductions = (each["backend"] for each in seen)
    assert isinstance(collectives._gathers.unordered, ExchangeByDevice)
    # What lies on the device goes to NCCL, small agreements of the host do not.
    total = torch.ones(3).as_subclass(Elsewhere)
    collectives.sum_(total, "test")
    assert reductions.calls == [("allreduce", 3, torch.float32)] and total.tolist() == [2.0] * 3
    assert collectives.sum_(torch.ones(1), "test").item() == 2.0
    assert collectives.broadcast_(torch.ones(1), 0, "test").item() == 1.0
    assert len(reductions.calls) == 1 and not gathers.calls


def of_a_group(monkeypatch: pytest.MonkeyPatch, backend: str, ranks: int = 2) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(ranks)))
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backend)


def test_more_ranks_than_can_be_added_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    of_a_group(monkeypatch, "cuda:nccl", 257)
    with pytest.raises(ValueError, match=r"257 ranks: .* at most 256 .*'precision\.reduction' to 'backend'"):
        make_collectives(object(), 1.0, CUDA)  # type: ignore[arg-type]


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
