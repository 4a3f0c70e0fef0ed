"""The host gives a device its steps and does not wait: agreements, errors and norms that it learns later."""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zero_ext
from tests.accelerator.host_waits import HostWaits
from tests.accelerator.stand_in import BACKEND
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import adamw, check_same, lion, poisoned_gradient
from zero_ext import ops
from zero_ext.comm import Collectives
from zero_ext.config.events import DeviceStepEnd, Event, StepEnd
from zero_ext.zero import engine_of
from zero_ext.zero.units.collective_errors import CollectiveError

DEVICE = "stand_in:0"
NAME = "blocks.1.up.weight"
STAGES = (0, 1, 2, 3)


def prepared(
    world: World, stage: int, dtype: str, clip: float, device: str = DEVICE, **more: Any
) -> tuple[Any, Any]:
    torch.manual_seed(world.seed)
    model = TinyModel().to(device)
    make: Callable[[Any], torch.optim.Optimizer] = more.pop("make", adamw)
    config = {
        "stage": stage,
        "gradient_clipping": clip,
        "timeout_seconds": 120.0,
        "units": {"bucket_elements": 700},
        "precision": {"dtype": dtype},
        **more,
    }
    # The strict backend of the device, as a group has it that was made with it alone.
    offered = mock.patch.object(dist, "get_backend_config", lambda group: f"stand_in:{BACKEND}")
    with offered if device == DEVICE else contextlib.nullcontext():
        return zero_ext.prepare(model, make(model.parameters()), config, process_group=world.group)


def batch(world: World, step: int, model: Any) -> torch.Tensor:
    return language_batch(world.seed, step, 0, world.rank).to(engine_of(model).device)


def step_of(model: Any, optimizer: Any, tokens: torch.Tensor, torch_clip: float | None = None) -> None:
    model.backward(language_loss(model, tokens))
    if torch_clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), torch_clip)
    optimizer.step()
    optimizer.zero_grad()


def assert_alike_before_and_after(world: World, step: int, *trained: tuple[Any, Any]) -> None:
    """Two models and their optimizers have the same state, and the same again after the step ``step``."""
    assert_same(*(state_of(*each) for each in trained))
    for model, optimizer in trained:
        step_of(model, optimizer, batch(world, step, model))
    assert_same(*(state_of(*each) for each in trained))


def bad_gradient(world: World, model: Any) -> contextlib.AbstractContextManager[None]:
    return poisoned_gradient(world, model, NAME)


def state_of(model: Any, optimizer: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """The whole parameters of a model on the host, and its optimizer's counts."""
    found = {name: value.cpu() for name, value in zero_ext.full_state_dict(model, rank0_only=False).items()}
    return found, optimizer.state_dict()["scalars"]


def assert_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    assert one[1] == other[1]
    check_same(one[0], other[0])


# By name: dtype, configured clipping, norm for torch's clipping, more configuration, most waits a step.
CASES: dict[str, tuple[str, float, float | None, dict[str, Any], int]] = {
    "bf16, clipped": ("bf16", 0.1, None, {}, 0),
    "bf16": ("bf16", 0.0, None, {}, 0),
    "fp32, clipped": ("fp32", 0.1, None, {}, 0),
    "8-bit moments": ("bf16", 0.1, None, {"precision": {"dtype": "bf16", "moments_dtype": "8bit"}}, 0),
    "Lion": ("bf16", 0.1, None, {"make": lion}, 0),
    "torch's clipping": ("bf16", 0.0, 0.1, {}, 1),
    "fp16, clipped": ("fp16", 0.1, None, {}, 1),
    "optimizer in host memory": ("bf16", 0.1, None, {"offload": {"optimizer": "host"}}, 99),
}


# Every stage, and the other cases in one of them.
PAIRS = [("bf16, clipped", stage) for stage in STAGES] + [("fp16, clipped", stage) for stage in (0, 3)]
PAIRS += [("torch's clipping", stage) for stage in (1, 3)]
PAIRS += [(name, 2) for name in CASES if not any(name == each for each, _ in PAIRS)]


@pytest.mark.parametrize(("name", "stage"), PAIRS)
@on_ranks(1, 2, stand_in=True, by_turns=True)
def test_what_a_step_waits_for_and_agrees_on(world: World, name: str, stage: int) -> None:
    dtype, clip, torch_clip, more, most = CASES[name]
    model, optimizer = prepared(world, stage, dtype, clip, **more)
    agreements: list[str] = []
    sums = Collectives.sum_

    def sum_(own: Collectives, tensor: torch.Tensor, label: str) -> torch.Tensor:
        if tensor.device.type == "cpu" and own.world_size > 1:
            agreements.append(label)
        return sums(own, tensor, label)

    for step in range(3):
        tokens = batch(world, step, model)
        agreements.clear()
        pageable = torch.stand_in.pageable_copies()  # type: ignore[attr-defined]
        with mock.patch.object(Collectives, "sum_", sum_), HostWaits() as waits:
            step_of(model, optimizer, tokens, torch_clip)
        if step < 2:
            continue  # the order of reductions is agreed on in the first
        assert len(waits.found) <= most, (step, waits.log)
        if most == 0:
            assert torch.stand_in.pageable_copies() == pageable  # type: ignore[attr-defined]
        if dtype == "fp16":
            assert "update" in waits.log[: waits.log.index(waits.found[0])], waits.log
        assert len(agreements) <= 1, (step, agreements)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@on_ranks(1, 2, stand_in=True)
def test_torchs_functions_of_gradients_wait_once_a_call(world: World, norm_type: float) -> None:
    for stage in (1, 3):
        model, optimizer = prepared(world, stage, "bf16", 0.0)
        step_of(model, optimizer, batch(world, 0, model))
        model.backward(language_loss(model, batch(world, 1, model)))
        gradients = [each.grad for each in model.parameters()]
        with HostWaits() as waits:
            norm = torch.nn.utils.get_total_norm(gradients, norm_type)
        assert waits.found == []
        with HostWaits() as waits:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5 * norm.item(), norm)
        assert len(waits.found) <= 2, waits.log  # one of them is the test's
        for foreach in (None, False):
            with HostWaits() as waits:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type, foreach=foreach)
            assert len(waits.found) <= 1, waits.log


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@on_ranks(1, 2, stand_in=True, by_turns=True)
def test_clipped_steps_are_the_cpus_bit_for_bit(world: World, dtype: str) -> None:
    """fp16's first steps overflow, which is learned after their launch."""
    for stage in (1, 3):
        found = []
        for device in (DEVICE, "cpu"):
            more = {"loss_scale": {"initial_power": 17}} if dtype == "fp16" else {}
            model, optimizer = prepared(world, stage, dtype, 0.1, device, **more)
            norms = []
            for step in range(5):
                step_of(model, optimizer, batch(world, step, model))
                norms.append(engine_of(model).grad_norm)
            engine = engine_of(model)
            counts = (engine.steps, engine.skipped_steps, engine.optimizer_step.scaler.state_dict())
            found.append((norms, counts, state_of(model, optimizer)))
        (device_norms, device_counts, device_state), (norms, counts, state) = found
        assert all(map(_same_number, device_norms, norms)) and device_counts == counts
        assert_same(device_state, state)


def _same_number(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(1, 2, stand_in=True)
def test_a_norm_that_is_not_finite_stops_the_device_and_is_named_when_the_host_looks(
    world: World, stage: int
) -> None:
    for look in ("step", "state", "lazily"):
        model, optimizer = prepared(world, stage, "bf16", 0.1)
        other, other_optimizer = prepared(world, stage, "bf16", 0.1)
        for each, own in ((model, optimizer), (other, other_optimizer)):
            step_of(each, own, batch(world, 0, each))
        with bad_gradient(world, model):
            step_of(model, optimizer, batch(world, 1, model))
        with pytest.raises(FloatingPointError, match=f"gradients of step 2: .* in '{NAME}'") as failure:
            if look == "step":
                torch.accelerator.synchronize()
                step_of(model, optimizer, batch(world, 2, model))
            elif look == "lazily":
                # Whether a verdict has arrived is another matter on each rank.
                for step in range(2, 40):
                    step_of(model, optimizer, batch(world, step, model))
                    if step % 2 == world.rank:
                        torch.accelerator.synchronize()
            else:
                assert math.isnan(engine_of(model).grad_norm)
                zero_ext.full_state_dict(model)
        assert "No parameter or optimizer state was changed" in str(failure.value)
        assert engine_of(model).steps == 1
        optimizer.zero_grad()
        assert_alike_before_and_after(world, 3, (model, optimizer), (other, other_optimizer))


@on_ranks(1, 2, stand_in=True)
def test_counts_of_this_ranks_state_are_those_of_steps_that_were_made(world: World) -> None:
    model, optimizer = prepared(world, 2, "bf16", 0.1)
    step_of(model, optimizer, batch(world, 0, model))
    before = optimizer.state_dict()["scalars"]
    with bad_gradient(world, model):
        step_of(model, optimizer, batch(world, 1, model))
    if world.rank == 0:
        assert optimizer.state_dict()["scalars"] == before and engine_of(model).steps == 1
    with pytest.raises(FloatingPointError, match=NAME):
        step_of(model, optimizer, batch(world, 2, model))


@on_ranks(1, 2, stand_in=True)
def test_weights_that_are_not_finite_are_found_by_the_next_steps_verdict(world: World) -> None:
    for stage in (0, 3):
        model, optimizer = prepared(world, stage, "fp32", 0.0)
        parameter = dict(model.module.named_parameters())["embedding.weight"]
        step_of(model, optimizer, batch(world, 0, model))
        with zero_ext.gathered([parameter], modifier_rank=0):
            if world.rank == 0:
                parameter.data[22, 0] = math.inf
        step_of(model, optimizer, torch.zeros_like(batch(world, 1, model)))
        with pytest.raises(FloatingPointError, match=r"weights after step 2: .* in 'embedding\.weight'"):
            for _ in range(2):
                step_of(model, optimizer, torch.zeros_like(batch(world, 1, model)))
                torch.accelerator.synchronize()
        with pytest.raises(RuntimeError, match="its state is damaged"):
            model(batch(world, 2, model))


@pytest.mark.parametrize("what", ["lr", "edit"])
@on_ranks(2, stand_in=True)
def test_a_step_that_the_ranks_would_make_differently_changes_nothing(world: World, what: str) -> None:
    model, optimizer = prepared(world, 3, "bf16", 0.0)
    other, other_optimizer = prepared(world, 3, "bf16", 0.0)
    for each, own in ((model, optimizer), (other, other_optimizer)):
        step_of(each, own, batch(world, 0, each))
    model.backward(language_loss(model, batch(world, 1, model)))
    group = optimizer.param_groups[0]
    before = group["lr"]
    if what == "lr":
        group["lr"] = before * (1 + world.rank)
    else:
        dict(model.module.named_parameters())[NAME].grad.mul_(1.0 + world.rank)
    wanted = r"'lr': expected" if what == "lr" else f"'{NAME}'.grad by mul_|last on this one"
    with pytest.raises(RuntimeError, match=wanted):
        optimizer.step()
        zero_ext.full_state_dict(model)
    group["lr"] = before
    optimizer.zero_grad()
    assert_same(state_of(model, optimizer), state_of(other, other_optimizer))


@on_ranks(1, stand_in=True)
def test_the_norm_of_a_step_is_published_when_the_device_has_it(world: World) -> None:
    model, optimizer = prepared(world, 2, "bf16", 0.1)
    events: list[Event] = []
    engine = engine_of(model)
    engine.subscribe(events.append)
    norms = []
    for step in range(4):
        step_of(model, optimizer, batch(world, step, model))
        norms.append(engine.grad_norm)
    assert [each.grad_norm for each in events if isinstance(each, StepEnd)] == [None] * 4
    reported = {each.step: each.grad_norm for each in events if isinstance(each, DeviceStepEnd)}
    assert len(reported) >= 3 and all(norms[step - 1] == norm for step, norm in reported.items())


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


EIGHT_BITS = {"precision": {"dtype": "bf16", "moments_dtype": "8bit"}}
# By name: how the optimizer is made, its setting, the bad value, what is said of it, more configuration.
ERRORS: dict[str, tuple[Callable[..., Any], str, Any, str, dict[str, Any]]] = {
    "AdamW": (adamw, "betas", (1.5, 0.9), r"adam_step_: beta1 of hyper\[0\]: .*got 1\.5\.", {}),
    "8-bit Adam": (adamw, "eps", -1.0, r"adam_step_8bit_: eps of hyper\[0\]: .*got -1\.", EIGHT_BITS),
    "Lion": (lion, "weight_decay", float("inf"), r"lion_step_: weight_decay of hyper\[0\]: .*got inf\.", {}),
}
LOOKS = ("waiting", "lazily", "state")
ERROR_PAIRS = [("AdamW", look) for look in LOOKS] + [("8-bit Adam", "waiting"), ("Lion", "state")]


@pytest.mark.parametrize(("name", "look"), ERROR_PAIRS)
@on_ranks(1, 2, stand_in=True, by_turns=True)
def test_a_bad_setting_changes_nothing_and_is_raised_on_all_ranks(world: World, name: str, look: str) -> None:
    make, setting, value, said, more = ERRORS[name]
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
        with pytest.raises(CollectiveError, match=said) as raised:
            until_raised(world, model, optimizer, 3, look)
        assert ": device of rank 0: " in str(raised.value)
        assert re.match("step 3: .* The step did not update all state", str(raised.value))
        check_same({key: value.cpu() for key, value in optimizer.state_dict()["shards"].items()}, before)
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
