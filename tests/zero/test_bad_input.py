"""Mistakes of the user and failures of ranks: errors that name the offender, and nothing half-done."""

from __future__ import annotations

import os
import re
import signal
import warnings
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
    TinyModel,
    feature_batch,
    feature_loss,
    language_batch,
    language_loss,
)
from tests.zero.training import adamw, configuration
from zero_ext import ops
from zero_ext.config.config_errors import ConfigError
from zero_ext.config.offload import StatePlacement
from zero_ext.zero import engine_of
from zero_ext.zero.units.flat_layout import FlatLayout, ParameterSpec


def prepared(world: World, model: nn.Module, stage: int, **more: Any) -> tuple[Any, Any]:
    return zero_ext.prepare(
        model, adamw(model.parameters()), configuration(stage, **more), process_group=world.group
    )


@on_ranks(1, 2)
def test_step_without_backward(world: World) -> None:
    for stage in (0, 1, 2, 3):
        model, optimizer = prepared(world, TinyModel(layers=1), stage)
        before = zero_ext.full_state_dict(model)
        with pytest.raises(
            RuntimeError, match=r"optimizer\.step\(\): expected a gradient(?s:.*)loss.backward"
        ):
            optimizer.step()
        language_loss(model, language_batch(world.seed, 0, 0, world.rank)).backward()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="expected a gradient, got none"):
            optimizer.step()
        after = zero_ext.full_state_dict(model)
        assert all(torch.equal(before[name], after[name]) for name in before)
        language_loss(model, language_batch(world.seed, 0, 0, world.rank)).backward()
        optimizer.step()


@on_ranks(2)
def test_a_backward_that_only_one_rank_runs_ends_in_time_with_names(world: World) -> None:
    config = configuration(1, timeout_seconds=4.0)
    model = nn.Linear(WIDTH, 2)
    model, optimizer = zero_ext.prepare(model, adamw(model.parameters()), config, process_group=world.group)
    out = model(feature_batch(world.seed, 0, 0, world.rank)).sum()
    if world.rank == 0:
        with pytest.raises(
            RuntimeError, match=r"rank 0: reduce-scatter of the gradients of unit 'bucket.0' \(2"
        ):
            out.backward()
    else:
        with pytest.raises(RuntimeError, match=r"rank 1: agreement on gradients number 1, 4 elements"):
            optimizer.step()


@on_ranks(2)
def test_step_inside_backward(world: World) -> None:
    model, optimizer = prepared(world, nn.Sequential(Block(), Block()), 3)
    out = model(feature_batch(world.seed, 0, 0, world.rank))
    inner = out * 1.0
    caught = []

    def step(gradient: torch.Tensor) -> None:
        try:
            optimizer.step()
        except RuntimeError as error:
            caught.append(str(error))

    handle = model.module[0].register_full_backward_hook(lambda *_: step(None))  # type: ignore[arg-type]
    feature_loss(lambda _: model(feature_batch(world.seed, 0, 0, world.rank)), None).backward()  # type: ignore[arg-type]
    handle.remove()
    del inner
    assert caught and "expected no backward pass around it" in caught[0]


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


def test_configurations_and_worlds_that_do_not_exist() -> None:
    model = nn.Linear(2, 2)
    for stage in (4, -1, "3", None, 1.5, True):
        with pytest.raises(ConfigError, match="stage"):
            zero_ext.prepare(model, None, {"stage": stage})
    with pytest.raises(ConfigError, match="gradient_clipping"):
        zero_ext.prepare(model, None, {"gradient_clipping": float("nan")})
    with pytest.raises(ValueError, match="stage: expected a ZeRO stage 0, 1, 2 or 3, got 4"):
        StatePlacement.of_stage(4)
    for world_size in (0, -1):
        with pytest.raises(ValueError, match=f"world_size: expected at least 1, got {world_size}"):
            FlatLayout.build([ParameterSpec("a", (2,), (1,), torch.float32)], world_size)
    with pytest.raises(ValueError, match="expected one with parameters, got ReLU"):
        zero_ext.prepare(nn.ReLU(), None, {"stage": 3})
    with pytest.raises(ValueError, match=r"'weight': expected values, got device 'meta'"):
        zero_ext.prepare(nn.Linear(2, 2, device="meta"), None, {"stage": 3})
    zero_ext.prepare(model, None, {"stage": 3})


# What is different on the last rank, how the error calls it, and the values on rank 0 and the last.
DIFFERENCES = {
    "shape": (
        "parameter number 2",
        '["1.weight", [4, 4], "torch.float32", "trainable", "param group 0"]',
        '["1.weight", [5, 4], "torch.float32", "trainable", "param group 0"]',
    ),
    "name": (
        "parameter number 2",
        '["1.weight", [4, 4], "torch.float32", "trainable", "param group 0"]',
        '["1.other.weight", [4, 4], "torch.float32", "trainable", "param group 0"]',
    ),
    "dtype": (
        "parameter number 2",
        '["1.weight", [4, 4], "torch.float32", "trainable", "param group 0"]',
        '["1.weight", [4, 4], "torch.bfloat16", "trainable", "param group 0"]',
    ),
    "frozen": (
        "parameter number 3",
        '["1.bias", [4], "torch.float32", "trainable", "param group 0"]',
        '["1.bias", [4], "torch.float32", "frozen", "param group 0"]',
    ),
    "more": (
        "parameter number 4 where rank 0 has nothing more",
        "nothing",
        '["2.weight", [4, 4], "torch.float32", "trainable", "param group 0"]',
    ),
    "fewer": (
        "nothing more where rank 0 has parameter number 2",
        '["1.weight", [4, 4], "torch.float32", "trainable", "param group 0"]',
        "nothing",
    ),
    "stage": ("configuration key 'stage'", "3", "2"),
    "clip": ("configuration key 'gradient_clipping'", "0.0", "0.5"),
    "class": ("optimizer", "AdamW", "Adam"),
    "none": ("optimizer", "AdamW", "none"),
    "lr": ("optimizer param group 0, 'lr'", "0.001", "0.02"),
    "weight_decay": ("optimizer param group 0, 'weight_decay'", "0.1", "0.02"),
    "groups": (
        "parameter number 1",
        '["0.bias", [4], "torch.float32", "trainable", "param group 1"]',
        '["0.bias", [4], "torch.float32", "trainable", "param group 0"]',
    ),
}


@on_ranks(2, 3)
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_other_models_optimizers_and_configurations_are_named_on_all_ranks(
    world: World, difference: str
) -> None:
    odd = world.size - 1
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = configuration(3)
    kind, settings = optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}
    if world.rank == odd:
        if difference == "shape":
            model[1] = nn.Linear(4, 5)
        elif difference == "name":
            model = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"other": nn.Linear(4, 4)}))
        elif difference == "dtype":
            model[1].bfloat16()
        elif difference == "frozen":
            model[1].bias.requires_grad_(False)
        elif difference == "more":
            model.append(nn.Linear(4, 4))
        elif difference == "fewer":
            model.pop(1)
        elif difference == "stage":
            config["stage"] = 2
        elif difference == "clip":
            config["gradient_clipping"] = 0.5
        elif difference == "class":
            kind = optim.Adam
        elif difference != "groups":
            settings[difference] = 0.02
    parameters: Any = list(model.parameters())
    if difference == "groups":  # as many groups of as many parameters
        split = 2 if world.rank == odd else 1
        parameters = [{"params": parameters[:split]}, {"params": parameters[split:]}]
    optimizer = kind(parameters, **settings) if difference != "none" or world.rank != odd else None
    name, local, there = DIFFERENCES[difference]
    pattern = f"{name}: expected {local} on all ranks, as on rank 0, got {there} on rank {odd}. Ranks [{odd}]"
    with pytest.raises(RuntimeError, match=f"^rank {world.rank}: {re.escape(pattern)} differ"):
        zero_ext.prepare(model, optimizer, config, process_group=world.group)
    good, _ = prepared(world, nn.Linear(4, 4), 3)
    good(torch.ones(1, 4)).sum().backward()


@on_ranks(2)
def test_ranks_begin_with_rank_0s_values_and_buffers(world: World) -> None:
    for stage in (0, 3):
        torch.manual_seed(world.seed + world.rank)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model[1].running_mean.fill_(world.rank + 5.0)
        first = {name: value.clone() for name, value in model.state_dict().items()}
        model, _ = prepared(world, model, stage)
        everyone = world.everyone(zero_ext.full_state_dict(model))
        wanted = world.everyone(first)[0]
        for state in everyone:
            assert all(torch.equal(state[name], wanted[name]) for name in wanted)


@on_ranks(1, 2)
def test_sparse_gradients_are_refused_by_name(world: World) -> None:
    for stage in (0, 3):
        model, _ = prepared(world, nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2)), stage)
        with pytest.raises(
            RuntimeError, match=r"'0\.weight': expected a dense one, got torch\.sparse_coo(?s:.*)sparse=False"
        ):
            model(torch.tensor([[1, 2]])).sum().backward()


@on_ranks(1, 2)
def test_a_gradient_that_is_not_finite_is_named_and_nothing_is_updated(world: World) -> None:
    for stage in (0, 1, 2, 3):
        model, optimizer = prepared(world, nn.Sequential(Block(), Block()), stage, gradient_clipping=1.0)
        before = zero_ext.full_state_dict(model)
        features = feature_batch(world.seed, 0, 0, world.rank)
        handle = model.module[1].up.weight.register_hook(
            lambda g: g * float("nan") if world.rank == world.size - 1 else g
        )
        feature_loss(model, features).backward()
        with pytest.raises(FloatingPointError, match=r"infinity in '1\.up\.weight' \(their norm is nan"):
            optimizer.step()
        handle.remove()
        after = zero_ext.full_state_dict(model)
        assert all(torch.equal(before[name], after[name]) for name in before)
        optimizer.zero_grad()
        feature_loss(model, features).backward()
        optimizer.step()


@on_ranks(1, 2)
def test_fp16_needs_the_scaled_loss(world: World) -> None:
    for stage in (0, 3):
        model, _ = prepared(world, TinyModel(layers=1), stage, precision={"dtype": "fp16"})
        with pytest.raises(RuntimeError, match=r"Call model.backward\(loss\)"):
            language_loss(model, language_batch(world.seed, 0, 0, world.rank)).backward()


@on_ranks(1, 2)
def test_no_optimizer_no_step(world: World) -> None:
    model, nothing = zero_ext.prepare(TinyModel(layers=1), None, configuration(3), process_group=world.group)
    assert nothing is None
    with torch.no_grad():
        assert model(language_batch(world.seed, 0, 0, 0)).isfinite().all()
    with pytest.raises(RuntimeError, match="expected one with an optimizer"):
        engine_of(model).step()
    with pytest.raises(ValueError, match="expected a prepared one, got Linear"):
        engine_of(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="model: expected a prepared module, got 'a folder'"):
        zero_ext.save_checkpoint(model, "a folder")  # type: ignore[arg-type]  # its arguments exchanged


def die_in_backward(world: World) -> None:
    model, _ = prepared(world, nn.Sequential(Block(), Block()), 3)
    feature_loss(model, feature_batch(world.seed, 0, 0, world.rank)).backward()
    loss = feature_loss(model, feature_batch(world.seed, 1, 0, world.rank))
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()


def wander_off(world: World) -> None:
    config = configuration(3)
    config["timeout_seconds"] = 6.0
    model = nn.Sequential(Block(), Block())
    model, _ = zero_ext.prepare(model, adamw(model.parameters()), config, process_group=world.group)
    if world.rank == 0:
        feature_loss(model, feature_batch(world.seed, 1, 0, world.rank)).backward()
    else:
        raise KeyError("the real reason")


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


class Layers(nn.Module):
    """Equal blocks, of which one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.without: int | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            hidden = hidden if number == self.without else block(hidden)
        return hidden


@on_ranks(2)
@pytest.mark.parametrize("one_host", [True, False])
def test_ranks_that_leave_out_other_blocks_never_get_each_others_weights(
    world: World, one_host: bool
) -> None:
    units = {"persistence_threshold": 0, "prefetch_elements": 0}
    connected = ops.cross_process_connect if one_host else (lambda handle: False)
    with mock.patch.object(ops, "cross_process_connect", connected):
        model, _ = zero_ext.prepare(
            Layers(), None, configuration(3, units=units, timeout_seconds=4.0), process_group=world.group
        )
    model.without = 1 + world.rank
    with pytest.raises(RuntimeError, match=rf"gather of unit 'blocks\.{2 - world.rank}'"), torch.no_grad():
        model(feature_batch(world.seed, 0, 0, 0))


@on_ranks(1, 2)
def test_a_model_inside_a_prepared_one_is_refused(world: World) -> None:
    for stage in (0, 3):
        outer = TinyModel(layers=1)
        prepared(world, outer, stage)
        with pytest.raises(ValueError, match=r"'0\.norm\.weight': it belongs to a prepared model already"):
            prepared(world, outer.blocks, stage)


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
    for stage in (0, 1, 2, 3):
        model = TinyModel(layers=2)
        model.blocks[0].requires_grad_(False)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        wrapped, _ = zero_ext.prepare(
            model, adamw(trainable), configuration(stage), process_group=world.group
        )
        model.blocks[0].up.bias.requires_grad_(True)
        with pytest.raises(
            RuntimeError, match=r"'blocks\.0\.up\.bias': expected no gradient, as it was frozen"
        ):
            language_loss(wrapped, language_batch(world.seed, 0, 0, world.rank)).backward()


@on_ranks(1)
def test_a_refused_forward_warns_of_nothing_else(world: World) -> None:
    model, _ = prepared(world, TinyModel(layers=1), 3)
    model.module.head.weight = nn.Parameter(torch.zeros(23, WIDTH))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match=r"'head\.weight': expected the one that"):
            model(language_batch(world.seed, 0, 0, 0))
