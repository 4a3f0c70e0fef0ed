"""Mistakes of the user and failures of ranks: errors that name the offender, and nothing half-done."""

from __future__ import annotations

import os
import re
import signal
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn, optim

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.pool import RankFailure, RankPool
from tests.multi.rank import World
from tests.zero.models import (
    WIDTH,
    Block,
    ChosenBlocks,
    TinyModel,
    feature_batch,
    feature_loss,
    language_batch,
    language_loss,
)
from tests.zero.training import adamw, check_same, configuration, language_steps, prepared
from zero_ext import ops
from zero_ext.config.config_errors import ConfigError
from zero_ext.config.offload import StatePlacement
from zero_ext.zero import engine_of


@on_ranks(1, 2)
def test_step_without_backward(world: World) -> None:
    for stage in (0, 1, 2, 3):
        model, optimizer = prepared(world, TinyModel(layers=1), stage)
        before = zero_ext.full_state_dict(model)
        wanted = r"optimizer\.step\(\): expected a gradient(?s:.*)loss.backward"
        with pytest.raises(RuntimeError, match=wanted):
            optimizer.step()
        language_loss(model, language_batch(world.seed, 0, 0, world.rank)).backward()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="expected a gradient, got none"):
            optimizer.step()
        check_same(model, before)
        language_steps(world, model, optimizer, [0])


@on_ranks(2)
def test_a_backward_that_only_one_rank_runs_ends_in_time_with_names(world: World) -> None:
    model, optimizer = prepared(world, nn.Linear(WIDTH, 2), 1, timeout_seconds=4.0)
    out = model(feature_batch(world.seed, 0, 0, world.rank)).sum()
    wanted = (
        r"rank 0: reduce-scatter of the gradients of unit 'bucket.0' \(2",
        r"rank 1: agreement on gradients number 1, 4 elements",
    )[world.rank]
    with pytest.raises(RuntimeError, match=wanted):
        out.backward() if world.rank == 0 else optimizer.step()


@on_ranks(2)
def test_step_inside_backward(world: World) -> None:
    model, optimizer = prepared(world, nn.Sequential(Block(), Block()))
    caught = []

    def step(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="expected no backward pass around it") as error:
            optimizer.step()
        caught.append(error)

    model.module[0].register_full_backward_hook(step)
    feature_loss(model, feature_batch(world.seed, 0, 0, world.rank).requires_grad_()).backward()
    assert caught


def test_an_optimizer_of_other_parameters() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    mixed = optim.SGD([*model.parameters(), other.weight], 0.1)
    with pytest.raises(ValueError, match=r"the model(?s:.*)param group 0, position 2, of shape \(2, 2\)"):
        zero_ext.prepare(model, mixed, {"stage": 3})
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer, got str"):
        zero_ext.prepare(model, "adam", {"stage": 3})  # type: ignore[arg-type]
    stepped = optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    stepped.step()
    with pytest.raises(ValueError, match="before its first step, got one with state"):
        zero_ext.prepare(model, stepped, {"stage": 3})
    zero_ext.prepare(model, optim.AdamW(model.parameters()), {"stage": 3})


def test_configurations_that_do_not_exist() -> None:
    model = nn.Linear(2, 2)
    for stage in (4, -1, "3", None, 1.5, True):
        with pytest.raises(ConfigError, match="stage"):
            zero_ext.prepare(model, None, {"stage": stage})
    with pytest.raises(ConfigError, match="gradient_clipping"):
        zero_ext.prepare(model, None, {"gradient_clipping": float("nan")})
    with pytest.raises(ValueError, match="stage: expected a ZeRO stage 0, 1, 2 or 3, got 4"):
        StatePlacement.of_stage(4)
    with pytest.raises(ValueError, match="expected one with parameters, got ReLU"):
        zero_ext.prepare(nn.ReLU(), None, {"stage": 3})
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got 5"):
        zero_ext.prepare(5, None, {"stage": 3})
    zero_ext.prepare(model, None, {"stage": 3})


def fact(
    name: str, shape: str = "[4, 4]", dtype: str = "float32", rest: str = "trainable", group: int = 0
) -> str:
    """How an error shows a parameter."""
    return f'["{name}", {shape}, "torch.{dtype}", "{rest}", "param group {group}"]'


# What is different on the last rank: how the error calls it, and the values on rank 0 and the last.
WEIGHT, BIAS = fact("1.weight"), fact("1.bias", "[4]")
DIFFERENCES = {
    "shape": ("parameter number 2", WEIGHT, fact("1.weight", "[5, 4]")),
    "name": ("parameter number 2", WEIGHT, fact("1.other.weight")),
    "dtype": ("parameter number 2", WEIGHT, fact("1.weight", dtype="bfloat16")),
    "frozen": ("parameter number 3", BIAS, fact("1.bias", "[4]", rest="frozen")),
    "more": ("parameter number 4 where rank 0 has nothing more", "nothing", fact("2.weight")),
    "fewer": ("nothing more where rank 0 has parameter number 2", WEIGHT, "nothing"),
    "stage": ("configuration key 'stage'", "3", "2"),
    "clip": ("configuration key 'gradient_clipping'", "0.0", "0.5"),
    "class": ("optimizer", "AdamW", "Adam"),
    "none": ("optimizer", "AdamW", "none"),
    "lr": ("optimizer param group 0, 'lr'", "0.001", "0.02"),
    "weight_decay": ("optimizer param group 0, 'weight_decay'", "0.1", "0.02"),
    "groups": ("parameter number 1", fact("0.bias", "[4]", group=1), fact("0.bias", "[4]")),
}
OTHER_MODELS: dict[str, Callable[[nn.Sequential], Any]] = {
    "shape": lambda model: model.__setitem__(1, nn.Linear(4, 5)),
    "name": lambda model: model.__setitem__(1, nn.ModuleDict({"other": nn.Linear(4, 4)})),
    "dtype": lambda model: model[1].bfloat16(),
    "frozen": lambda model: model[1].bias.requires_grad_(False),
    "more": lambda model: model.append(nn.Linear(4, 4)),
    "fewer": lambda model: model.pop(1),
}
OTHER_CONFIGURATIONS = {"stage": {"stage": 2}, "clip": {"gradient_clipping": 0.5}}


@on_ranks(2, 3, by_turns=True)
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_other_models_optimizers_and_configurations_are_named_on_all_ranks(
    world: World, difference: str
) -> None:
    odd = world.size - 1
    differs = difference if world.rank == odd else ""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    OTHER_MODELS.get(differs, id)(model)
    config = configuration(3) | OTHER_CONFIGURATIONS.get(differs, {})
    settings = {"lr": 1e-3, "weight_decay": 0.1}
    settings |= {differs: 0.02} if differs in settings else {}
    parameters: Any = list(model.parameters())
    if difference == "groups":  # as many groups of as many parameters
        split = 2 if differs else 1
        parameters = [{"params": parameters[:split]}, {"params": parameters[split:]}]
    kind = optim.Adam if differs == "class" else optim.AdamW
    optimizer = None if differs == "none" else kind(parameters, **settings)
    name, local, there = DIFFERENCES[difference]
    pattern = f"{name}: expected {local} on all ranks, as on rank 0, got {there} on rank {odd}. Ranks [{odd}]"
    with pytest.raises(RuntimeError, match=f"^rank {world.rank}: {re.escape(pattern)} differ"):
        zero_ext.prepare(model, optimizer, config, process_group=world.group)
    good, _ = prepared(world, nn.Linear(4, 4))
    good(torch.ones(1, 4)).sum().backward()


@on_ranks(2)
def test_ranks_begin_with_rank_0s_values_and_buffers(world: World) -> None:
    for stage in (0, 3):
        torch.manual_seed(world.seed + world.rank)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model[1].running_mean.fill_(world.rank + 5.0)
        wanted = world.everyone({name: value.clone() for name, value in model.state_dict().items()})[0]
        model, _ = prepared(world, model, stage)
        for state in world.everyone(zero_ext.full_state_dict(model)):
            check_same(state, wanted)


@on_ranks(1, 2)
def test_sparse_gradients_are_refused_by_name(world: World) -> None:
    for stage in (0, 3):
        model, _ = prepared(world, nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2)), stage)
        with pytest.raises(
            RuntimeError, match=r"'0\.weight': expected a dense one, got torch\.sparse_coo(?s:.*)sparse=False"
        ):
            model(torch.tensor([[1, 2]])).sum().backward()


@on_ranks(1, 2)
def test_fp16_needs_the_scaled_loss(world: World) -> None:
    for stage in (0, 3):
        model, _ = prepared(world, TinyModel(layers=1), stage, precision={"dtype": "fp16"})
        with pytest.raises(RuntimeError, match=r"Call model.backward\(loss\)"):
            language_loss(model, language_batch(world.seed, 0, 0, world.rank)).backward()


@on_ranks(1, 2)
def test_no_optimizer_no_step(world: World) -> None:
    model, nothing = prepared(world, TinyModel(layers=1), 3, None)
    assert nothing is None
    with torch.no_grad():
        assert model(language_batch(world.seed, 0, 0, 0)).isfinite().all()
    with pytest.raises(RuntimeError, match="expected one with an optimizer"):
        engine_of(model).step()
    with pytest.raises(ValueError, match="expected a prepared one, got Linear"):
        engine_of(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="model: expected a prepared module, got 'a folder'"):
        zero_ext.save_checkpoint(model, "a folder")  # its arguments exchanged


def die_in_backward(world: World) -> None:
    model, _ = prepared(world, nn.Sequential(Block(), Block()), 3)
    feature_loss(model, feature_batch(world.seed, 0, 0, world.rank)).backward()
    loss = feature_loss(model, feature_batch(world.seed, 1, 0, world.rank))
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()


def wander_off(world: World) -> None:
    model, _ = prepared(world, nn.Sequential(Block(), Block()), timeout_seconds=6.0)
    if world.rank:
        raise KeyError("the real reason")
    feature_loss(model, feature_batch(world.seed, 1, 0, world.rank)).backward()


@pytest.mark.parametrize("fault", ["die_in_backward", "wander_off"])
def test_a_rank_that_is_gone_ends_the_others_naming_rank_unit_and_parameter(fault: str) -> None:
    pool = RankPool(2)
    try:
        with pytest.raises(RankFailure) as caught:
            pool.run(2, f"{__name__}:{fault}", {}, timeout=60.0)
    finally:
        pool.close()
    text = str(caught.value)
    assert "RuntimeError: rank 0: gather of unit '" in text, text
    assert ".norm.weight … " in text and "A peer rank has died" in text
    assert ("exit code -9" if fault == "die_in_backward" else "the real reason") in text


@on_ranks(2)
@pytest.mark.parametrize("one_host", [True, False])
def test_ranks_that_leave_out_other_blocks_never_get_each_others_weights(
    world: World, one_host: bool
) -> None:
    units = {"persistence_threshold": 0, "prefetch_elements": 0}
    connected = ops.cross_process_connect if one_host else (lambda handle: False)
    with mock.patch.object(ops, "cross_process_connect", connected):
        model, _ = prepared(world, ChosenBlocks(4), 3, None, units=units, timeout_seconds=4.0)
    model.order = [number for number in range(4) if number != 1 + world.rank]
    with pytest.raises(RuntimeError, match=rf"gather of unit 'blocks\.{2 - world.rank}'"), torch.no_grad():
        model(language_batch(world.seed, 0, 0, 0))


@on_ranks(1, 2)
def test_trainable_parameters_of_a_dtype_without_kernels_are_refused_by_name(world: World) -> None:
    for dtype in (torch.float64, torch.complex64):
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2).to(dtype)})
        with pytest.raises(ValueError, match=rf"'b\.weight'(?s:.*){dtype}"):
            prepared(world, model, 3)
        assert model["b"].weight.isfinite().all()
        model["b"].requires_grad_(False)
        prepared(world, model, 3)


@on_ranks(1, 2)
def test_unfreezing_what_the_optimizer_lacks_is_refused_by_name(world: World) -> None:
    def trainable(parameters: Any) -> optim.Optimizer:
        return adamw(each for each in parameters if each.requires_grad)

    for stage in (0, 1, 2, 3):
        model = TinyModel(layers=2)
        model.blocks[0].requires_grad_(False)
        prepared_model, _ = prepared(world, model, stage, trainable)
        model.blocks[0].up.bias.requires_grad_(True)
        refusal = r"'blocks\.0\.up\.bias': expected no gradient, as it was frozen"
        with pytest.raises(RuntimeError, match=refusal):
            language_loss(prepared_model, language_batch(world.seed, 0, 0, world.rank)).backward()


@on_ranks(1)
def test_a_refused_forward_warns_of_nothing_else(world: World) -> None:
    model, _ = prepared(world, TinyModel(layers=1), 3)
    model.module.head.weight = nn.Parameter(torch.zeros(23, WIDTH))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match=r"'head\.weight': expected the one that"):
            model(language_batch(world.seed, 0, 0, 0))
