"""Precision of sums: in nodes and over them, on the wire, and of parameters that several parts have."""

from __future__ import annotations

import contextlib
import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_ext
from tests.accelerator.stand_in import BACKEND
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.comm.process_group import make_collectives
from zero_ext.config import ZeroConfig
from zero_ext.config.offload import StatePlacement
from zero_ext.zero import engine_of
from zero_ext.zero.memory.gathered_unit import UnitSpec
from zero_ext.zero.units.parameter_marks import mark_tied
from zero_ext.zero.unshard.pool_replay import demands_of_a_step

SHAPES = ((33, 7), (5,), (64, 3))


class Weighted(nn.Module):
    """Its parameters' gradients are what its forward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in SHAPES)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return sum(
            (weight * gradient).sum() for weight, gradient in zip(self.weights, gradients, strict=True)
        )


def gradients_of(seed: int, rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def averaged(world: World, stage: int, passes: int, **more: Any) -> tuple[list[torch.Tensor], Any]:
    """The averaged gradients after as many backward passes, and the engine."""
    dtype = torch.bfloat16 if more.get("dtype") == "bf16" else torch.float32
    config = {
        "stage": stage,
        "precision": {"reduction": "node_order", **more},
        "communication": {"ranks_per_node": 2},
        "batch": {"gradient_accumulation_steps": passes},
    }
    model = Weighted()
    model, optimizer = zero_ext.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config, process_group=world.group
    )
    for step in range(2):
        for number in range(passes):
            model(gradients_of(world.seed + 100 * (number + passes * step), world.rank, dtype)).backward()
        found = [zero_ext.full_gradient(weight) for weight in model.weights]
        optimizer.step()
        optimizer.zero_grad()
    return found, engine_of(model)


def expected(world: World, dtype: torch.dtype, rounded_to: torch.dtype, seed: int) -> list[torch.Tensor]:
    """The mean inside each node of two, rounded to ``rounded_to``, and then over the nodes, in float32."""
    each = [
        [one.to(rounded_to).float() for one in gradients_of(seed, rank, dtype)] for rank in range(world.size)
    ]
    nodes = [
        [
            ((first + second) * 0.5).to(rounded_to).float()
            for first, second in zip(*each[at : at + 2], strict=True)
        ]
        for at in range(0, world.size, 2)
    ]
    return [(first + second) * 0.5 for first, second in zip(*nodes, strict=True)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(4)
def test_sums_are_made_in_nodes_and_then_over_them(world: World, stage: int) -> None:
    for kind, rounded_to in ((None, None), ("bf16", None), ("bf16", "fp32"), (None, "bf16")):
        dtype = torch.bfloat16 if kind else torch.float32
        names = {"bf16": torch.bfloat16, "fp32": torch.float32, None: dtype}
        precision = {"dtype": kind} if kind else {}
        found, _ = averaged(world, stage, 1, **precision, communication_dtype=rounded_to)
        for one, other in zip(
            found, expected(world, dtype, names[rounded_to], world.seed + 100), strict=True
        ):
            assert torch.equal(one.float(), other.to(dtype).float()), (kind, rounded_to)


@on_ranks(4)
def test_passes_add_up_and_memory_is_planned(world: World) -> None:
    for stage in (2, 3):
        found, engine = averaged(world, stage, 2)
        sums = [expected(world, torch.float32, torch.float32, world.seed + 100 * each) for each in (2, 3)]
        for one, first, second in zip(found, *sums, strict=True):
            assert torch.equal(one, first + second)
        assert engine.pool.overflow.total_bytes == 0


@on_ranks(4)
def test_what_crosses_is_less_than_a_rings_share(world: World) -> None:
    _, engine = averaged(world, 2, 1)
    traffic = engine.traffic
    sent = 4 * traffic.last_elements["reduce_scatter"]
    # Of a ring over N ranks (N - 1) / N of the bytes leave each node.
    ring = sent * (world.size - 1) // world.size // 2
    assert traffic.last_crossing_bytes["reduce_scatter"] == sent // 2 // 2 <= ring
    assert traffic.last_bytes_sent["reduce_scatter"] == sent // 2 + sent // 4


@pytest.mark.parametrize(
    ("reduction", "purposes"),
    [("rank_order", {"received": 7 * 2}), ("node_order", {"sent": 8 * 2}), ("backend", {"received": 1 * 2})],
)
def test_the_memory_of_a_reduction_is_planned(reduction: str, purposes: dict[str, int]) -> None:
    """Of a unit of 8 shards in 16 bits, in bytes per element of a shard."""
    shard = 1 << 20
    unit = UnitSpec("unit", 8 * shard, 2, 8, StatePlacement.of_stage(3), (0, 0), 0, (0, 0))
    demands = demands_of_a_step([unit], ZeroConfig(stage=3, precision={"reduction": reduction}))
    found = {each.key[1]: each.nbytes for each in demands if each.key[1] in ("received", "sent")}
    assert found == {purpose: shard * times for purpose, times in purposes.items()}


def batch(world: World, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(world.seed + rank)
    return torch.randn(5, 12, generator=generator)


@on_ranks(2, 3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_rounded_once_and_summed_in_fp32(world: World, stage: int) -> None:
    torch.manual_seed(world.seed)
    plain = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 3))
    bytes_sent = {}
    for dtype in (None, "bf16"):
        model = copy.deepcopy(plain)
        model, _ = zero_ext.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            {"stage": stage, "precision": {"communication_dtype": dtype}},
            process_group=world.group,
        )
        model(batch(world, world.rank)).square().mean().backward()
        bytes_sent[dtype] = engine_of(model).traffic.bytes_sent["reduce_scatter"]
        found = [zero_ext.full_gradient(parameter) for parameter in model.parameters()]
    assert bytes_sent["bf16"] * 2 == bytes_sent[None] > 0

    wanted = [torch.zeros_like(parameter) for parameter in plain.parameters()]
    for rank in range(world.size):
        plain.zero_grad()
        plain(batch(world, rank)).square().mean().backward()
        for total, parameter in zip(wanted, plain.parameters(), strict=True):
            total += parameter.grad.bfloat16().float()
    for total, gradient in zip(wanted, found, strict=True):
        torch.testing.assert_close(gradient, total / world.size, rtol=1e-6, atol=1e-9)


SIZE = 1500
TIES = {"everywhere": (0, 1, 2), "at the ends": (0, 2), "at the end": (1, 2)}
LARGE = 64 << 10


class Stage(nn.Module):
    """What one rank has; the gradients are what its forward is given."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.tied = nn.ParameterDict(
            {name: nn.Parameter(torch.zeros(SIZE)) for name, ranks in TIES.items() if rank in ranks}
        )
        self.own = nn.Parameter(torch.zeros(SIZE))
        for name, parameter in self.tied.items():
            mark_tied(parameter, name, TIES[name])

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        tied = [(self.tied[name] * gradients[name].to(self.own)).sum() for name in self.tied]
        return torch.stack([*tied, self.own.sum()]).sum()


def tied_gradients(seed: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + rank)
    return {name: torch.randn(SIZE, generator=generator).bfloat16() for name in TIES}


@pytest.mark.parametrize("device", ["cpu", "stand_in", BACKEND])
@on_ranks(3, stand_in=True)
def test_ties_add_up_in_float32_and_rank_order(world: World, device: str) -> None:
    mesh = DeviceMesh("cpu", torch.arange(3).view(3, 1), mesh_dim_names=("pp", "dp"))
    model: Any = Stage(world.rank).to("cpu" if device == "cpu" else "stand_in")
    offered = mock.patch.object(dist, "get_backend_config", lambda group: f"stand_in:{BACKEND}")
    with offered if device == BACKEND else contextlib.nullcontext():
        model, optimizer = zero_ext.prepare(
            model,
            torch.optim.SGD(model.parameters(), 1.0),
            {"stage": 1, "precision": {"dtype": "bf16"}},
            process_group=mesh,
        )
    for step in range(2):
        gradients = [tied_gradients(world.seed + 10 * step, rank) for rank in range(3)]
        model(gradients[world.rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    reached = zero_ext.full_state_dict(model, rank0_only=False)
    for name in model.tied:
        value = torch.zeros(SIZE)
        for step in range(2):
            total = torch.zeros(SIZE)
            for rank in TIES[name]:
                total += tied_gradients(world.seed + 10 * step, rank)[name].float()
            value -= total.bfloat16().float()
        assert torch.equal(reached[f"tied.{name}"].cpu(), value.bfloat16()), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int64"])
@on_ranks(3)
def test_half_precision_is_rounded_once(world: World, dtype: str) -> None:
    """Of sums of host tensors: short ones, and long ones, which travel in slices."""
    collectives, kind = make_collectives(world.group, 20.0), getattr(torch, dtype)
    for numel in (7, LARGE + 5):
        generator = torch.Generator().manual_seed(world.seed)
        each = (torch.randn(3, numel, generator=generator) * 9).to(kind)
        wide = each if kind is torch.int64 else each.float()
        expected = (wide[0] + wide[1] + wide[2]).to(kind)
        assert torch.equal(collectives.sum_(each[world.rank].clone(), "test"), expected)
