"""Fused experts of transformers spread over ranks, under every ZeRO stage: as one process."""

from __future__ import annotations

import copy
import re
from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_ext
from tests.integrations.transformers.mixtures import (
    EXPERTS,
    FAMILIES,
    LISTED,
    batches,
    losses_alone,
    mixture_of,
    optimizer_of,
    reached_experts,
)
from tests.integrations.transformers.models import enter, shared_folder
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.parallel import apply_expert_parallel, make_mesh
from zero_ext.zero.units.dtensor_local import local_tensor

STEPS = 3
# Llama 4 calls its experts with the rows of all of them, most of which are zero.
SPREAD = [family for family in FAMILIES if family != "llama4"]
# Each stage with another number of ranks along "ep".
CASES = [(1, 4), (2, 2), (3, 4), (3, 2), (3, 1)]


@cache
def mesh_of(ep: int) -> DeviceMesh:
    """All ranks, experts spread over ``ep`` of them; made once in a process."""
    return make_mesh(ep=ep, device_type="cpu")


def steps_of(
    world: World, made: nn.Module, mesh: DeviceMesh, config: dict[str, Any], words: list[torch.Tensor]
) -> tuple[Any, list[float]]:
    """A prepared copy of a model after a step for each batch, and the means of the ranks' losses."""
    model = apply_expert_parallel(copy.deepcopy(made), mesh)
    model, optimizer = zero_ext.prepare(model, optimizer_of(model), config, process_group=mesh)
    losses = []
    for each in words:
        own = each[world.rank, None]
        loss = model(input_ids=own, labels=own).loss
        model.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(world.everyone(float(loss.detach()))) / world.size)
    return model, losses


def assert_values(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal names, shapes and values but for rounding."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4, msg=name)


@on_ranks(4)
@pytest.mark.parametrize("family", SPREAD)
def test_steps_and_full_values_are_those_of_one_process(world: World, family: str) -> None:
    enter(world)
    made, words = mixture_of(family, world.seed), batches(world.seed, world.size, STEPS)
    reached = world.everyone(reached_experts(made, words[0][world.rank, None]))
    assert any(each != reached[0] for each in reached), f"ranks reach the same experts, seed {world.seed}"
    alone = copy.deepcopy(made)
    expected = losses_alone(alone, words)
    for stage, ep in CASES:
        model, losses = steps_of(world, made, mesh_of(ep), {"stage": stage}, words)
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0, msg=f"{stage}, {ep}, {world.seed}")
        assert_values(zero_ext.full_state_dict(model), alone.state_dict())
