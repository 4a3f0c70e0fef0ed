"""Compiled blocks: one graph for a class of blocks, the same values, no silent fall back to eager."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import (
    WIDTH,
    Block,
    TinyModel,
    feature_batch,
    feature_loss,
    language_batch,
    language_loss,
)
from tests.zero.training import (
    Plan,
    check_close,
    configuration,
    distance,
    placed,
    plain_backward,
    prepared,
    sgd,
    train_prepared,
)
from zero_ext.zero import engine_of


@on_ranks(2, by_turns=True)
@pytest.mark.parametrize(
    "how", ["block in place before", "block after", "module in place after", "wrapper after"]
)
def test_compiling_in_place_or_after_prepare_is_right_as_well(world: World, how: str) -> None:
    torch._dynamo.reset()
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block())
    model: Any = copy.deepcopy(plain)
    if how == "block in place before":
        model[1].compile(backend="aot_eager")
    model, optimizer = prepared(world, model, 3, sgd)
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
        plain_backward(world, plain, step, feature_loss, feature_batch)
        reference.step()
        reference.zero_grad()
    got = {name.replace("_orig_mod.", ""): value for name, value in zero_ext.full_state_dict(model).items()}
    assert distance(got, plain.state_dict()) < 1e-6


TIERS = ("device", "host", "nvme")


def placements() -> Iterator[tuple[int, dict[str, Any]]]:
    """Every stage with everything on the device, and stage 3 with its parameters in every other tier."""
    yield from ((stage, {}) for stage in range(4))
    yield from ((3, {"params": tier, "grads": tier, "optimizer": tier}) for tier in TIERS[1:])


def compiled_tiny_model(backend: str, how: str) -> TinyModel:
    """Three compiled blocks among plain modules, or all of it compiled."""
    model = TinyModel()
    if backend and how == "whole":
        return torch.compile(model, backend=backend, fullgraph=True)  # type: ignore[return-value]
    for number, block in enumerate(model.blocks if backend else []):
        if how == "in place":
            block.compile(backend=backend, fullgraph=True)
        else:
            model.blocks[number] = torch.compile(block, backend=backend, fullgraph=True)
    return model


def check_compiled(world: World, device: str, plan: Plan) -> None:
    """Compiled blocks train as plain ones do, in every place, in one graph that is made once."""

    def batch(*position: int) -> torch.Tensor:
        return language_batch(*position).to(device)

    for number, (stage, offload) in enumerate(placements()):
        runs = []
        for kind in ("", "aot_eager"):
            torch.manual_seed(world.seed)
            torch._dynamo.reset()
            counters.clear()
            how = ("in place", "whole", "wrapped")[number % 3]
            model = compiled_tiny_model(kind, how).to(device)
            with placed(offload) as section:
                config = configuration(stage, plan, offload=section)
                runs.append(train_prepared(world, model, language_loss, batch, config, plan))
        named = {name.replace("_orig_mod.", ""): value for name, value in runs[1].parameters.items()}
        check_close(runs[1]._replace(parameters=named), runs[0], 1e-2 if plan.dtype == "bf16" else 1e-6)
        assert counters["stats"]["unique_graphs"] == 1, (stage, offload, counters)
        assert not counters["graph_break"], (stage, offload, counters)


@on_ranks(1, 2, by_turns=True)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_compiled_blocks_train_as_plain_ones_in_every_stage_and_tier(world: World, dtype: str) -> None:
    check_compiled(world, "cpu", Plan(micro_batches=2, clip=0.1, dtype=dtype))


@on_ranks(1, stand_in=True)
def test_compiled_blocks_on_an_accelerator(world: World) -> None:
    check_compiled(world, "stand_in", Plan(clip=0.1))


@on_ranks(1, stand_in=True)
def test_parameters_and_gradients_stay_in_place_where_graphs_may_be_captured(world: World) -> None:
    """Stages 0 to 2: a captured block reads the addresses of its parameters, and hooks would keep torch from
    capturing it. Stage 3 gathers into whatever memory is free."""
    for device, stage in itertools.product(("cpu", "stand_in"), range(3)):
        model = TinyModel().to(device)
        engine_model, optimizer = prepared(world, model, stage)
        for block in model.blocks:
            for module in block.modules():
                assert not module._forward_pre_hooks and not module._forward_hooks
                assert not module._backward_hooks and type(module._parameters) is dict
        seen = []
        for step in range(3):
            batch = language_batch(world.seed, step, 0, 0).to(device)
            engine_model.backward(language_loss(engine_model, batch))
            engine = engine_of(engine_model)
            owners = [engine.gradients_of(unit).for_optimizer() for unit in engine.units]
            gradients = [owner.memory("device").data_ptr() for owner in owners]
            seen.append(([each.data_ptr() for each in model.parameters()], gradients))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(([each.data_ptr() for each in model.parameters()], gradients))
        assert all(each == seen[0] for each in seen), (device, stage)


def test_a_wholly_compiled_model_without_blocks_is_refused() -> None:
    model = torch.compile(nn.Linear(2, 2), backend="eager")
    with pytest.raises(ValueError, match="expected one with blocks in a ModuleList"):
        zero_ext.prepare(model, None, {"stage": 3})
