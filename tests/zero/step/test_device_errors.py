"""Errors that kernels record reach all ranks with the next step's verdict, and the host does not wait."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import zero_ext
from tests.accelerator.host_waits import HostWaits
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.step.test_host_waits import (
    DEVICE,
    assert_alike_before_and_after,
    batch,
    lion,
    prepared,
    step_of,
)
from tests.zero.training import adamw
from zero_ext import ops
from zero_ext.zero import engine_of
from zero_ext.zero.units.collective_errors import CollectiveError

NEGATIVE = torch.tensor([-3.0], dtype=torch.float64).view(torch.int64).item()
# quantize_blockwise: entry of values[5], as a kernel on the device records it.
QUANTIZED = torch.tensor([2, 5, 2, 5, 3, NEGATIVE, 8])


def record_on_last_rank(world: World, record: torch.Tensor) -> Any:
    """The next look at this rank's device finds an error there, if it is the last rank."""
    waiting = [record] if world.rank == world.size - 1 else []
    original = ops.pop_device_error_

    def found(into: torch.Tensor) -> None:
        original(into)
        if waiting:
            into.copy_(waiting.pop())

    return mock.patch.object(ops, "pop_device_error_", found)


def until_raised(world: World, model: Any, optimizer: Any, first: int, look: str) -> None:
    if look == "state":
        zero_ext.full_state_dict(model)
    for step in range(first, 40):
        step_of(model, optimizer, batch(world, step, model))
        if look == "waiting" or (look == "lazily" and step % 2 == world.rank):
            torch.accelerator.synchronize()


# By name: how the optimizer is made, its setting, the bad value, what is said of it, more configuration.
CASES: dict[str, tuple[Callable[..., Any], str, Any, str, dict[str, Any]]] = {
    "AdamW": (adamw, "betas", (1.5, 0.9), "adam_step_: beta1 of hyper[0]: expected in [0, 1), got 1.5.", {}),
    "8-bit Adam": (
        adamw,
        "eps",
        -1.0,
        "adam_step_8bit_: eps of hyper[0]: expected finite and not negative, got -1.",
        {"precision": {"dtype": "bf16", "moments_dtype": "8bit"}},
    ),
    "Lion": (
        lion,
        "weight_decay",
        float("inf"),
        "lion_step_: weight_decay of hyper[0]: expected finite, got inf.",
        {},
    ),
}


LOOKS = ("waiting", "lazily", "state")
PAIRS = [("AdamW", look) for look in LOOKS] + [("8-bit Adam", "waiting"), ("Lion", "state")]


@pytest.mark.parametrize(("name", "look"), PAIRS)
@on_ranks(1, 2, stand_in=True)
def test_a_bad_setting_changes_nothing_and_is_raised_on_all_ranks(world: World, name: str, look: str) -> None:
    make, setting, value, said, more = CASES[name]
    for stage in (0, 3):
        model, optimizer = prepared(world, stage, "bf16", 0.1, make=make, **more)
        step_of(model, optimizer, batch(world, 0, model))
        zero_ext.full_state_dict(model)
        step_of(model, optimizer, batch(world, 1, model))
        before = {key: value.cpu() for key, value in optimizer.state_dict()["shards"].items()}
        optimizer.param_groups[0][setting] = value
        with HostWaits() as waits:
            step_of(model, optimizer, batch(world, 2, model))
        assert waits.found == []
        with pytest.raises(CollectiveError, match=re.escape(said)) as raised:
            until_raised(world, model, optimizer, 3, look)
        assert ": device of rank 0: " in str(raised.value)
        assert re.match("step 3: .* The step did not update all state", str(raised.value))
        after = optimizer.state_dict()["shards"]
        assert before.keys() == after.keys() and len(before) > 5
        assert all(torch.equal(value, after[key].cpu()) for key, value in before.items())
        with pytest.raises(RuntimeError, match="its state is damaged"):
            model(batch(world, 2, model))
        ops.raise_device_errors(DEVICE)


@pytest.mark.parametrize("look", LOOKS)
@on_ranks(1, 2, stand_in=True)
def test_an_error_of_another_kernel_on_one_rank_stops_the_step_on_all(world: World, look: str) -> None:
    said = "quantize_blockwise: entry of values[5]: expected 0 or more for the unsigned code, got -3."
    wanted = re.escape(f"device of rank {world.size - 1}: {said} The step was not made")
    for stage in (0, 3):
        model, optimizer = prepared(world, stage, "bf16", 0.0)
        other, other_optimizer = prepared(world, stage, "bf16", 0.0)
        for each, own in ((model, optimizer), (other, other_optimizer)):
            step_of(each, own, batch(world, 0, each))
        with record_on_last_rank(world, QUANTIZED), pytest.raises(RuntimeError, match=wanted):
            until_raised(world, model, optimizer, 1, look)
        assert engine_of(model).steps == 1
        optimizer.zero_grad()
        assert_alike_before_and_after(world, 3, (model, optimizer), (other, other_optimizer))


@on_ranks(2, stand_in=True)
def test_an_error_comes_before_what_follows_from_it(world: World) -> None:
    """The host waits in each step of fp16; the gradients are scaled by a norm that is not finite."""
    model, optimizer = prepared(world, 2, "fp16", 0.1)
    with (
        record_on_last_rank(world, QUANTIZED),
        pytest.raises(RuntimeError, match="device of rank 1: quantize_"),
    ):
        step_of(model, optimizer, batch(world, 0, model) * 0)


@on_ranks(1, 2, stand_in=True)
def test_an_update_s_error_is_its_engine_s_where_several_share_a_device(world: World) -> None:
    """The other one steps first, and is not damaged."""
    bad, bad_optimizer = prepared(world, 3, "bf16", 0.0)
    good, good_optimizer = prepared(world, 3, "bf16", 0.0)
    step_of(bad, bad_optimizer, batch(world, 0, bad))
    bad_optimizer.param_groups[0]["betas"] = (1.5, 0.9)
    step_of(bad, bad_optimizer, batch(world, 1, bad))
    bad_optimizer.param_groups[0]["betas"] = (0.9, 0.9)
    for step in range(4):
        step_of(good, good_optimizer, batch(world, step, good))
        torch.accelerator.synchronize()
    zero_ext.full_state_dict(good)
    assert engine_of(good).optimizer_step.damage is None
    with pytest.raises(CollectiveError, match=re.escape("beta1 of hyper[0]: expected in [0, 1), got 1.5.")):
        until_raised(world, bad, bad_optimizer, 2, "waiting")


@on_ranks(1, 2, stand_in=True)
def test_what_was_recorded_before_a_model_is_no_error_of_its_steps(world: World) -> None:
    ops.load_kernels(torch.device(DEVICE))
    with record_on_last_rank(world, QUANTIZED.to(DEVICE)), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer = prepared(world, 3, "bf16", 0.0)
    messages = [str(each.message) for each in caught if "before this model was prepared" in str(each.message)]
    assert len(messages) == (world.rank == world.size - 1)
    assert all("quantize_blockwise" in text for text in messages)
    for step in range(3):
        step_of(model, optimizer, batch(world, step, model))
    zero_ext.full_state_dict(model)
