"""Optimizers and schedulers built from names."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch

import zero_ext
from zero_ext.config import ConfigError, OptimizerConfig, SchedulerConfig, load_deepspeed_config
from zero_ext.config.optimizer_traits import OPTIMIZERS, UNSUPPORTED_OPTIMIZERS
from zero_ext.config.training import SCHEDULERS, UNSUPPORTED_SCHEDULERS
from zero_ext.optim import schedulers
from zero_ext.optim.optimizer_builder import build_optimizer, build_scheduler, check_scheduler


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.linspace(-1, 1, 5))]


def built(kind: str, **params: Any) -> torch.optim.Optimizer:
    return build_optimizer(OptimizerConfig(type=kind, params=params), parameters())


def stepped(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    (parameter,) = optimizer.param_groups[0]["params"]
    for step in range(3):
        parameter.grad = torch.full_like(parameter, 0.5 - step)
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_known_optimizer_is_torchs_or_ours(name: str) -> None:
    names = {"Adam": torch.optim.AdamW, "Lamb": zero_ext.Lamb, "Lion": zero_ext.Lion, "Muon": zero_ext.Muon}
    names |= {each: getattr(zero_ext, each) for each, row in OPTIMIZERS.items() if row.one_bit_stages}
    wanted = names[name] if name in names else getattr(torch.optim, name)
    for spelling in (name, name.lower(), name.upper()):
        assert type(built(spelling, lr=0.05)) is wanted
    if not OPTIMIZERS[name].one_bit_stages:  # those step only between ranks
        assert stepped(built(name, lr=0.05)).equal(stepped(wanted(parameters(), lr=0.05)))


def test_adam_means_adamw_by_default() -> None:
    decayed = {"lr": 0.1, "weight_decay": 0.5}
    assert stepped(built("Adam", **decayed)).equal(stepped(torch.optim.AdamW(parameters(), **decayed)))
    for key in ("adam_w_mode", "adamw_mode", "adamw"):
        made = built("Adam", **decayed, **{key: False})
        assert type(made) is torch.optim.Adam
        assert stepped(made).equal(stepped(torch.optim.Adam(parameters(), **decayed)))
        assert type(built("AdamW", **{key: True})) is torch.optim.AdamW
        with pytest.raises(ConfigError, match=r"optimizer\.type: AdamW contradicts"):
            built("AdamW", **{key: False})
        with pytest.raises(
            ConfigError, match=rf"optimizer\.params\.{key}: expected true or false, got 1 \(int\)"
        ):
            built("Adam", **{key: 1})
    with pytest.raises(ConfigError, match="contradict each other"):
        built("Adam", adam_w_mode=True, adamw=False)


def test_params_arrive() -> None:
    made = built("AdamW", lr=0.3, betas=[0.8, 0.9], eps=1e-6, weight_decay=0.2, amsgrad=True, maximize=True)
    group = made.param_groups[0]
    assert group["lr"] == 0.3
    assert group["betas"] == (0.8, 0.9)
    assert group["eps"] == 1e-6
    assert group["weight_decay"] == 0.2
    assert group["amsgrad"] is True
    assert group["maximize"] is True


def test_param_groups_pass_through() -> None:
    one, two = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    made = build_optimizer(
        OptimizerConfig(type="SGD", params={"lr": 0.5}), [{"params": [one]}, {"params": [two], "lr": 0.25}]
    )
    assert [group["lr"] for group in made.param_groups] == [0.5, 0.25]
    assert made.param_groups[1]["params"] == [two]


def test_deepspeeds_adam_decays_nothing_by_default() -> None:
    policy = load_deepspeed_config({"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}).config.optimizer
    assert policy is not None
    wanted = torch.optim.AdamW(parameters(), lr=0.1, weight_decay=0.0)
    assert stepped(build_optimizer(policy, parameters())).equal(stepped(wanted))


@pytest.mark.parametrize("name", [*UNSUPPORTED_OPTIMIZERS])
def test_refused_optimizers(name: str) -> None:
    for spelling in (name, name.lower()):
        with pytest.raises(ConfigError, match=f"type: expected a supported .*, got {name}"):
            OptimizerConfig(type=spelling)


@pytest.mark.parametrize("name", [*UNSUPPORTED_SCHEDULERS])
def test_refused_schedulers(name: str) -> None:
    with pytest.raises(ConfigError, match=f"type: expected a supported .*, got {name}"):
        SchedulerConfig(type=name)


def test_every_optimizer_of_torch_is_decided() -> None:
    """A torch that adds an optimizer makes this fail until someone decides about it."""
    torchs = {
        name
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    }
    assert torchs <= {*OPTIMIZERS, *UNSUPPORTED_OPTIMIZERS}


@pytest.mark.parametrize(
    ("kind", "params", "path", "fragment"),
    [
        ("AdamW", {"lr": True}, "optimizer.params.lr", "got True (bool)"),
        ("AdamW", {"lr": "auto"}, "optimizer.params.lr", "got 'auto' (str)"),
        ("AdamW", {"lr": -1}, "optimizer.params.lr", "at least 0"),
        ("AdamW", {"lr": None}, "optimizer.params.lr", "got None"),
        ("AdamW", {"eps": -1e-8}, "optimizer.params.eps", "at least 0"),
        ("AdamW", {"weight_decay": -0.1}, "optimizer.params.weight_decay", "at least 0"),
        ("AdamW", {"betas": [0.9]}, "optimizer.params.betas", "a list of 2 numbers"),
        ("AdamW", {"betas": [0.9, 1.0]}, "optimizer.params.betas", "[0, 1)"),
        ("AdamW", {"betas": 0.9}, "optimizer.params.betas", "a list of 2 numbers"),
        ("AdamW", {"amsgrad": 1}, "optimizer.params.amsgrad", "true or false"),
        ("AdamW", {"foreach": "yes"}, "optimizer.params.foreach", "true or false"),
        ("AdamW", {"weight_decai": 0}, "optimizer.params.weight_decai", "Did you mean weight_decay"),
        ("AdamW", {"params": []}, "optimizer.params.params", "AdamW has no such parameter"),
        ("SGD", {"momentum": "x"}, "optimizer.params.momentum", "finite number"),
        ("SGD", {"nesterov": True}, "optimizer.params", "Nesterov"),
        ("RMSprop", {"alpha": -1}, "optimizer.params.alpha", "at least 0"),
        ("Rprop", {"etas": [0.5]}, "optimizer.params.etas", "a list of 2 numbers"),
    ],
)
def test_bad_optimizer_params(kind: str, params: dict[str, Any], path: str, fragment: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built(kind, **params)
    assert path in caught.value.paths
    assert fragment in str(caught.value)


ARGUMENTS: dict[str, dict[str, Any]] = {
    "WarmupDecayLR": {"total_num_steps": 2000},
    "WarmupCosineLR": {"total_num_steps": 2000},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
    "CosineAnnealingLR": {"T_max": 9},
    "CosineAnnealingWarmRestarts": {"T_0": 9},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 0.2, "cycle_momentum": False},
    "ExponentialLR": {"gamma": 0.9},
    "MultiStepLR": {"milestones": [2, 4]},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 50},
    "StepLR": {"step_size": 2},
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_known_scheduler_is_built(name: str) -> None:
    params = ARGUMENTS.get(name, {})
    where = schedulers if name in schedulers.__all__ else torch.optim.lr_scheduler
    one, two = built("AdamW", lr=0.1), built("AdamW", lr=0.1)
    made = build_scheduler(SchedulerConfig(type=name.lower(), params=params), one)
    assert type(made) is getattr(where, name)
    assert made.optimizer is one
    wanted = getattr(where, name)(two, **params)
    for _ in range(5):
        for optimizer, scheduler in ((one, made), (two, wanted)):
            optimizer.step()
            scheduler.step()
        assert one.param_groups[0]["lr"] == two.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("kind", "params", "path", "fragment"),
    [
        ("WarmupDecayLR", {}, "scheduler.params.total_num_steps", "WarmupDecayLR requires it"),
        (
            "WarmupLR",
            {"warmup_num_step": 3},
            "scheduler.params.warmup_num_step",
            "Did you mean warmup_num_steps",
        ),
        ("WarmupLR", {"warmup_num_steps": 0}, "scheduler.params.warmup_num_steps", "got 0"),
        ("WarmupLR", {"warmup_type": "x"}, "scheduler.params.warmup_type", "'log' or 'linear'"),
        (
            "LRRangeTest",
            {"lr_range_test_staircase": 1},
            "scheduler.params.lr_range_test_staircase",
            "true or false",
        ),
        ("StepLR", {"step_size": "a"}, "scheduler.params.step_size", "an integer of at least 1"),
        ("CosineAnnealingLR", {"T_max": 0}, "scheduler.params.T_max", "an integer of at least 1"),
        ("PolynomialLR", {"power": "x"}, "scheduler.params.power", "finite number"),
    ],
)
def test_bad_scheduler_params(kind: str, params: dict[str, Any], path: str, fragment: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_scheduler(SchedulerConfig(type=kind, params=params), built("AdamW"))
    assert path in caught.value.paths
    assert fragment in str(caught.value)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_check_changes_nothing(name: str) -> None:
    made = torch.optim.AdamW(parameters(), lr=torch.tensor(0.1))
    before = {key: value for key, value in made.param_groups[0].items() if key != "params"}
    check_scheduler(SchedulerConfig(type=name, params=ARGUMENTS.get(name, {})), made)
    after = {key: value for key, value in made.param_groups[0].items() if key != "params"}
    assert after == before
    assert float(made.param_groups[0]["lr"]) == pytest.approx(0.1)
    assert "step" not in vars(made)


def test_a_check_raises_what_building_would() -> None:
    made = built("SGD", lr=0.1)
    for kind, params in (("WarmupLR", {"warmup_max_lr": [1, 2]}), ("StepLR", {}), ("WarmupLR", {"x": 1})):
        with pytest.raises(ConfigError) as caught:
            check_scheduler(SchedulerConfig(type=kind, params=params), made)
        with pytest.raises(ConfigError) as building:
            build_scheduler(SchedulerConfig(type=kind, params=params), made)
        assert str(caught.value) == str(building.value)


def test_non_finite_params_never_reach_torch() -> None:
    for value in (math.nan, math.inf, [0.9, math.nan]):
        with pytest.raises(ConfigError, match=r"params\.x"):
            OptimizerConfig(type="AdamW", params={"x": value})
