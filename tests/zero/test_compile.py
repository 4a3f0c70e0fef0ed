"""Compiled blocks: one graph for a class of blocks, the same values, no silent fall back to eager."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import WIDTH, Block, feature_batch, feature_loss
from tests.zero.training import adamw, configuration
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


def test_a_wholly_compiled_model_is_refused() -> None:
    model = torch.compile(nn.Linear(2, 2), backend="eager")
    with pytest.raises(ValueError, match="compile its blocks instead"):
        zero_ext.prepare(model, None, {"stage": 3})
