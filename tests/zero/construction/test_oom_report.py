"""What is said where a device has too little memory: what was planned, and settings that do fit."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from torch.optim import Adafactor, AdamW, Optimizer

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.optim.full_tensors import full_tensor_optimizers
from tests.zero.models import TinyModel, language_batch, language_loss
from zero_ext.config.tiers import TIERS
from zero_ext.zero import engine_of
from zero_ext.zero.construction import oom_report
from zero_ext.zero.construction.oom_report import MemoryEstimate


def prepared_with_estimate(
    world: World, config: dict[str, Any], make: Callable[[Any], Optimizer] = AdamW
) -> tuple[MemoryEstimate, Any, Any]:
    """The estimate that ``prepare`` makes, and what it returns."""
    made: list[MemoryEstimate] = []

    def estimate(*arguments: Any) -> MemoryEstimate:
        made.append(MemoryEstimate(*arguments))
        return made[-1]

    model = TinyModel()
    at_owners = make not in (AdamW, adafactor)
    with mock.patch.object(importlib.import_module("zero_ext.zero.api.prepare"), "MemoryEstimate", estimate):
        prepared = zero_ext.prepare(
            model, make(model.parameters()), config, process_group=world.group, whole_tensors=at_owners
        )
    return made[0], *prepared


def estimated(world: World, config: dict[str, Any]) -> MemoryEstimate:
    """The estimate that ``prepare`` makes with AdamW."""
    return prepared_with_estimate(world, config)[0]


def held_by(estimate: MemoryEstimate, capacity: str) -> int:
    tiers = estimate.bytes_by_tier().items()
    return sum(sum(kinds.values()) for tier, kinds in tiers if TIERS[tier].capacity == capacity)


@on_ranks(2)
@pytest.mark.parametrize("config", [{"stage": 1}, {"stage": 3}, {"stage": 2, "offload": {"grads": "host"}}])
def test_the_advice_fits(world: World, config: dict[str, Any]) -> None:
    estimate = estimated(world, config)
    planned = held_by(estimate, "device")
    free = planned - 1
    text = estimate.message(free)
    settings = dict(re.findall(r"'([\w.]+)' '?(\w+)'?", text.split("Set ")[1]))
    assert settings and settings.keys() <= {"stage", "offload.params", "offload.grads", "offload.optimizer"}
    offload = {
        **config.get("offload", {}),
        **{key.split(".")[1]: value for key, value in settings.items() if "." in key},
    }
    advised = estimated(world, {"stage": int(settings.get("stage", config["stage"])), "offload": offload})
    assert held_by(advised, "device") <= free
    assert f"to use {held_by(advised, 'device') / 2**20:.1f} MiB there and" in text
    assert f"{held_by(advised, 'host') / 2**20:.1f} MiB of host memory" in text


@on_ranks(1)
def test_without_memory_nothing_is_advised(world: World) -> None:
    estimate = estimated(world, {"stage": 2})
    with mock.patch.object(oom_report, "_available_bytes", return_value=0):
        text = estimate.message(0)
    assert "Use more ranks, or smaller blocks ('units.tiles'), as no placement fits." in text
    assert "got 0.0 MiB" in text and "got 3.50 GiB" in estimate.message(7 << 29)


def adafactor(parameters: Any) -> Optimizer:
    return Adafactor(parameters, lr=1e-3)


@on_ranks(1, 2, 3, by_turns=True)
@pytest.mark.parametrize("make", ["adafactor", "Shampoo", "Rotated"])
@pytest.mark.parametrize(
    "config", [{"stage": 0}, {"stage": 2, "offload": {"optimizer": "host"}}, {"stage": 3}], ids=str
)
def test_state_with_shapes_of_its_own_is_counted(world: World, make: str, config: dict[str, Any]) -> None:
    """Averages of rows and columns, and what owners store for their tensors: as much as in a run."""
    kind = adafactor if make == "adafactor" else getattr(full_tensor_optimizers, make)
    estimate, model, optimizer = prepared_with_estimate(world, config, kind)
    planned = estimate.bytes_by_tier()
    for step in range(2):
        language_loss(model, language_batch(world.seed, step, 0, world.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for tier, kinds in engine_of(model).memory_by_tier().items():
        assert planned[tier]["optimizer"] == kinds["optimizer"], tier
