"""Compiled blocks: one graph for a class of blocks, the same values, no silent fall back to eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import WIDTH, Block, feature_batch, feature_loss
from tests.zero.training import adamw, configuration, distance, sgd
from zero_ext.zero import engine_of

LAYERS = 12


def compiled_stack(model: nn.Sequential) -> nn.Sequential:
    first, *blocks = model
    return nn.Sequential(first, *(torch.compile(block, backend="eager") for block in blocks))


@on_ranks(2, timeout=120)
def test_twelve_compiled_blocks_are_one_graph(world: World) -> None:
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(LAYERS)))
    losses = {}
    for kind in ("eager", "compiled"):
        model = copy.deepcopy(plain)
        torch._dynamo.reset()
        counters.clear()
        if kind == "compiled":
            model = compiled_stack(model)
        model, optimizer = zero_ext.prepare(
            model, adamw(model.parameters()), configuration(3), process_group=world.group
        )
        losses[kind] = []
        for step in range(3):
            loss = feature_loss(model, feature_batch(world.seed, step, 0, world.rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[kind].append(loss.item())
            assert engine_of(model).residency.live_elements == 0
    assert counters["stats"]["unique_graphs"] == 1, counters
    assert not counters["graph_break"], counters
    for one, two in zip(losses["compiled"], losses["eager"], strict=True):
        assert abs(one - two) <= 1e-6 * abs(two)


@on_ranks(2, timeout=120)
@pytest.mark.parametrize(
    "how", ["block in place before", "block after", "module in place after", "wrapper after"]
)
def test_compiling_in_place_or_after_prepare_is_right_as_well(world: World, how: str) -> None:
    torch._dynamo.reset()
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block())
    model: Any = copy.deepcopy(plain)
    if how == "block in place before":
        model[1].compile(backend="aot_eager")
    model, optimizer = zero_ext.prepare(
        model, sgd(model.parameters()), configuration(3), process_group=world.group
    )
    call = model
    if how == "block after":
        model.module[1] = torch.compile(model.module[1], backend="aot_eager")
    elif how == "module in place after":
        model.module.compile(backend="aot_eager")
    elif how == "wrapper after":
        call = torch.compile(model, backend="aot_eager")
    reference = sgd(plain.parameters())
    for step in range(2):
        feature_loss(call, feature_batch(world.seed, step, 0, world.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(world.size):
            (feature_loss(plain, feature_batch(world.seed, step, 0, rank)) / world.size).backward()
        reference.step()
        reference.zero_grad()
    got = {name.replace("_orig_mod.", ""): value for name, value in zero_ext.full_state_dict(model).items()}
    assert distance(got, plain.state_dict()) < 1e-6


def test_a_wholly_compiled_model_is_refused() -> None:
    model = torch.compile(nn.Linear(2, 2), backend="eager")
    with pytest.raises(ValueError, match="compile its blocks instead"):
        zero_ext.prepare(model, None, {"stage": 3})
