"""Gradients of parameters that several parts of a model have: added in float32 and rank order."""

from __future__ import annotations

import contextlib
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
from zero_ext.zero.units.parameter_marks import mark_tied

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


def gradients_of(seed: int, rank: int) -> dict[str, torch.Tensor]:
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
        gradients = [gradients_of(world.seed + 10 * step, rank) for rank in range(3)]
        model(gradients[world.rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    reached = zero_ext.full_state_dict(model, rank0_only=False)
    for name in model.tied:
        value = torch.zeros(SIZE)
        for step in range(2):
            total = torch.zeros(SIZE)
            for rank in TIES[name]:
                total += gradients_of(world.seed + 10 * step, rank)[name].float()
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
