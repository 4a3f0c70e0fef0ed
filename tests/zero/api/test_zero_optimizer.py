"""Optimizers on shards against one process: every allowed class, groups, schedulers, state round trips."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import (
    Plan,
    check_against_plain,
    check_equal,
    check_near,
    check_same,
    configuration,
    distance,
    language_steps,
    plain_backward,
    prepared,
    sgd,
    train_prepared,
)
from zero_ext.zero import engine_of
from zero_ext.zero.step.loss_scaler import LossScaler

MakeOptimizer = Callable[[Any], optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": lambda p: optim.AdamW(p, 1e-2, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
    "AdamW amsgrad": lambda p: optim.AdamW(p, 1e-2, eps=1e-3, amsgrad=True),
    "AdamW maximize": lambda p: optim.AdamW(p, 1e-2, eps=1e-3, maximize=True),
    "AdamW tensor lr": lambda p: optim.AdamW(p, torch.tensor(1e-2), eps=1e-3),
    "AdamW foreach": lambda p: optim.AdamW(p, 1e-2, eps=1e-3, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, 1e-2, eps=1e-3, fused=True),
    "Adam": lambda p: optim.Adam(p, 1e-2, eps=1e-3, weight_decay=0.1),
    "Adam decoupled": lambda p: optim.Adam(p, 1e-2, eps=1e-3, weight_decay=0.1, decoupled_weight_decay=True),
    "Adam amsgrad maximize": lambda p: optim.Adam(p, 1e-2, eps=1e-3, amsgrad=True, maximize=True),
    "Adadelta": lambda p: optim.Adadelta(p, 0.5),
    "Adagrad": lambda p: optim.Adagrad(p, 1e-2, lr_decay=0.01, eps=1e-4, initial_accumulator_value=0.1),
    "Adamax": lambda p: optim.Adamax(p, 1e-2, eps=1e-4, weight_decay=0.1),
    "ASGD": lambda p: optim.ASGD(p, 1e-1, t0=1),
    "NAdam": lambda p: optim.NAdam(p, 1e-2, eps=1e-3),
    "RAdam": lambda p: optim.RAdam(p, 1e-2, eps=1e-3),
    "RMSprop": lambda p: optim.RMSprop(p, 1e-3, eps=1e-4, momentum=0.5, centered=True),
    "SGD": lambda p: optim.SGD(p, 1e-1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD plain": lambda p: optim.SGD(p, 1e-1),
    "Rprop": lambda p: optim.Rprop(p, 1e-3),
}


@on_ranks(1, 2, 3, by_turns=True)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_allowed_class(world: World, name: str) -> None:
    """Against plain torch, clipped in stage 3; and in bf16 alike in every stage."""
    # Rprop steps by the gradient's sign alone: one rounding of a zero gradient is a whole step.
    tolerance, make = 2e-3 if name == "Rprop" else 5e-6, OPTIMIZERS[name]
    for stage, plan in ((1, Plan()), (3, Plan(clip=0.05))):
        torch.manual_seed(world.seed)
        model = TinyModel(layers=1)
        check_against_plain(world, model, language_loss, language_batch, stage, plan, make, tolerance)
    plan, runs = Plan(steps=2, clip=0.05, dtype="bf16"), []
    for stage in (0, 1, 2, 3) if name in ("SGD", "AdamW amsgrad") and world.size == 2 else ():
        torch.manual_seed(world.seed)
        config, model = configuration(stage, plan), TinyModel(layers=1)
        runs.append(train_prepared(world, model, language_loss, language_batch, config, plan, make))
    for run in runs[1:]:
        check_equal(run, runs[0])


def two_groups(parameters: Any) -> optim.Optimizer:
    # With a tiny eps Adam turns the rounding of a gradient near zero into a whole step.
    found = list(parameters)
    groups = [
        {"params": [p for p in found if p.dim() > 1], "weight_decay": 0.2, "eps": 1e-4},
        {"params": [p for p in found if p.dim() <= 1], "lr": 3e-3, "betas": (0.5, 0.9)},
    ]
    return optim.AdamW(groups, lr=1e-2, eps=1e-3, weight_decay=0.0)


SCHEDULES: dict[str, Callable[[optim.Optimizer], Any]] = {
    "OneCycleLR": lambda o: optim.lr_scheduler.OneCycleLR(o, [1e-2, 2e-2], total_steps=6),
    "LambdaLR": lambda o: optim.lr_scheduler.LambdaLR(o, [lambda s: 1 / (s + 1), lambda s: 1.0]),
    "Sequential": lambda o: optim.lr_scheduler.SequentialLR(
        o,
        [optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2), optim.lr_scheduler.CosineAnnealingLR(o, 4)],
        milestones=[2],
    ),
}


@on_ranks(1, 2, 3, by_turns=True)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_groups_and_live_schedulers(world: World, schedule: str) -> None:
    for stage in (0, 1, 3):
        torch.manual_seed(world.seed)
        model = TinyModel(layers=1)
        twin = copy.deepcopy(model)
        model, optimizer = prepared(world, model, stage, two_groups)
        assert isinstance(optimizer, optim.Optimizer)
        plain = two_groups(twin.parameters())
        ours, theirs = SCHEDULES[schedule](optimizer), SCHEDULES[schedule](plain)
        for step in range(4):
            language_steps(world, model, optimizer, [step])
            plain_backward(world, twin, step)
            plain.step()
            plain.zero_grad()
            ours.step()
            theirs.step()
            assert ours.get_last_lr() == theirs.get_last_lr()
            assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in plain.param_groups]
        check_near(model, twin, 2e-5, 2e-6)


@on_ranks(1, 2, by_turns=True)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "AdamW amsgrad", "NAdam", "ASGD", "AdamW tensor lr"])
def test_state_dict_round_trip(world: World, name: str) -> None:
    """Two steps, state into a fresh pair, two more steps: as four steps in one go."""
    for stage in (0, 1, 2, 3):
        models, precision = [], {"dtype": "bf16" if stage % 2 else "keep"}
        for _ in range(3):
            torch.manual_seed(world.seed)
            made = prepared(world, TinyModel(layers=1), stage, OPTIMIZERS[name], precision=precision)
            models.append(made)
        full, first, second = models
        language_steps(world, *full, range(4))
        language_steps(world, *first, range(2))
        second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
        language_steps(world, *second, range(2, 4))
        check_same(full[0], second[0], (name, stage))


@on_ranks(2)
def test_a_state_of_other_ranks_stage_or_parameters_is_refused(world: World) -> None:
    states = {}
    for stage in (1, 3):
        _, optimizer = prepared(world, TinyModel(layers=1), stage)
        states[stage] = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"'stage': 3(?s:.*)'stage': 1(?s:.*)save_checkpoint"):
        optimizer.load_state_dict(states[1])
    states[3]["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="the param groups and parameters of this optimizer, got others"):
        optimizer.load_state_dict(states[3])


def same_batch(seed: int, _step: int, micro: int, rank: int) -> Any:
    return language_batch(seed, 0, micro, rank)


@on_ranks(2)
@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_narrow_moments_train_alike(world: World, moments: str) -> None:
    """Steps on one batch: every loss stays within 2% of its value with fp32 moments."""
    for stage, plan in ((1, Plan(steps=6)), (3, Plan(steps=50 if moments == "8bit" else 6))):
        runs = []
        for kind in ("fp32", moments):
            torch.manual_seed(world.seed)
            config = configuration(stage, precision={"moments_dtype": kind})
            model = TinyModel(layers=1)
            runs.append(train_prepared(world, model, language_loss, same_batch, config, plan))
        exact, narrow = runs
        assert narrow.losses != exact.losses
        assert plan.steps < 50 or exact.losses[-1] < 0.6 * exact.losses[0]
        for one, two in zip(narrow.losses, exact.losses, strict=True):
            assert abs(one - two) <= 2e-2 * two
        if moments == "bf16":
            assert narrow.engine is not None
            found = narrow.engine.optimizer_step.stepper.values(0)
            assert {tensor.dtype for _, _, tensor in found} == {torch.bfloat16}


@on_ranks(1, 2)
def test_step_accepts_a_closure_and_profiles_as_torchs(world: World) -> None:
    model = TinyModel(layers=1)
    model, optimizer = prepared(world, model)

    def closure() -> torch.Tensor:
        loss = language_loss(model, language_batch(world.seed, 0, 0, world.rank))
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert engine_of(model).steps == 1
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.step(closure)
    assert seen == ["before", "after"]
    with pytest.raises(RuntimeError, match="add_param_group: expected every parameter before"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", range(4))
def test_dynamic_loss_scale_skips_on_all_ranks_and_recovers(world: World, stage: int) -> None:
    torch.manual_seed(world.seed)
    scale = {"initial_power": 8, "hysteresis": 1, "window": 2}
    model, optimizer = prepared(
        world, TinyModel(layers=1), stage, precision={"dtype": "fp16"}, loss_scale=scale
    )
    engine, scales = engine_of(model), []
    alone = LossScaler(engine.config.loss_scale)
    for step in range(5):
        before = zero_ext.full_state_dict(model)
        loss = language_loss(model, language_batch(world.seed, step, 0, world.rank))
        model.backward(loss * 1e30 if step == 1 and world.rank == world.size - 1 else loss)
        optimizer.step()
        assert optimizer.step_was_skipped == (step == 1)
        optimizer.zero_grad()
        after = zero_ext.full_state_dict(model)
        assert all(torch.equal(before[n], after[n]) for n in before) == (step == 1), step
        scales.append(engine.optimizer_step.scaler.scale)
        alone.update(step == 1)
        assert scales[-1] == alone.scale
    assert scales[:2] == [256.0, 128.0] and scales[-1] == 256.0
    assert optimizer.skipped_steps == engine.skipped_steps == 1


@on_ranks(1, 2)
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_optimizer_state_that_does_not_fit_changes_nothing(world: World, name: str) -> None:
    model, optimizer = prepared(world, TinyModel(layers=1), 1, OPTIMIZERS[name])
    language_steps(world, model, optimizer, [0])
    before = optimizer.state_dict()["shards"]
    first = next(iter(before))
    fits = {"scalars": optimizer.state_dict()["scalars"]}
    for change, message in (
        ({first: None}, f"missing .*{re.escape(first)}"),
        ({"exp_avg/nowhere/0": torch.ones(1)}, "lacks .*nowhere"),
        ({first: torch.ones(1)}, f"{re.escape(first)}': expected shape"),
        ({first: before[first].double()}, "of torch.float32, got .* of torch.float64"),
    ):
        state = optimizer.state_dict()
        shards = {key: value.fill_(7.0) for key, value in state["shards"].items()} | change
        state["shards"] = {key: value for key, value in shards.items() if value is not None}
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)
        check_same(optimizer.state_dict()["shards"], before)
    for scalars in ({}, {"step": {**fits["scalars"].get("step", {}), "norm.weight": -1}}):
        state = optimizer.state_dict() | {"scalars": scalars}
        state["shards"] = {key: torch.full_like(value, 7.0) for key, value in before.items()}
        with pytest.raises(ValueError, match=r"optimizer state of '\w+.*': expected"):
            optimizer.load_state_dict(state)
        check_same(optimizer.state_dict()["shards"], before)
        assert optimizer.state_dict()["scalars"] == fits["scalars"]


@on_ranks(2)
def test_optimizer_state_that_does_not_fit_on_one_rank_is_refused_on_all(world: World) -> None:
    _, optimizer = prepared(world, TinyModel(layers=1), 1)
    for change, message in (
        ({"layout": {}}, "use zero_ext.save_checkpoint"),
        ({"param_groups": []}, "expected the param groups"),
        ({"shards": None}, "TypeError"),
    ):
        state = optimizer.state_dict() | (change if world.rank == 1 else {})
        with pytest.raises(ValueError, match="optimizer state") as caught:
            optimizer.load_state_dict(state)
        wanted = message if world.rank == 1 else r"on ranks [1]"
        assert wanted.lower() in str(caught.value).lower()


class Slashes(nn.Module):
    """A module with a slash in its name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.add_module("in/a", nn.Linear(4, 6))
        self.out = nn.Linear(6, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.get_submodule("in/a")(inputs).tanh()).square().mean()
        return found


@pytest.mark.parametrize("kind", [optim.NAdam, optim.AdamW, optim.Adafactor])
def test_names_of_modules_may_have_slashes(kind: Any) -> None:
    pairs = []
    for _ in range(2):
        model = Slashes()
        pairs.append(zero_ext.prepare(model, kind(model.parameters(), lr=1e-2), {"stage": 2}))
    (model, optimizer), (_, other) = pairs
    model(torch.ones(2, 4)).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    other.load_state_dict(saved)
    for key in ("shards", "unsharded"):
        check_same(other.state_dict()[key], saved[key])


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", range(4))
def test_step_after_a_backward_that_raised(world: World, stage: int) -> None:
    """The message says so, and zero_grad is enough to go on."""

    def fail(*_: object) -> None:
        raise ValueError("on purpose")

    model = TinyModel(layers=2)
    twin = copy.deepcopy(model)
    model, optimizer = prepared(world, model, stage, sgd)
    hook = model.blocks[0].register_full_backward_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        language_loss(model, language_batch(world.seed, 0, 0, world.rank)).backward()
    hook.remove()
    with pytest.raises(RuntimeError, match="those of a backward pass that raised"):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="expected a gradient, got none"):
        optimizer.step()
    language_steps(world, model, optimizer, [1])
    plain_backward(world, twin, 1)
    sgd(twin.parameters()).step()
    assert distance(zero_ext.full_state_dict(model), twin.state_dict()) < 1e-6
