"""Gradients cross the wire in ``precision.communication_dtype``: half the bytes, rounded once a rank."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.zero import engine_of


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
