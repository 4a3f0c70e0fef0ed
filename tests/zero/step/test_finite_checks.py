"""Steps with NaN or infinity are refused by name on all ranks, in every tier and whenever updates run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import adamw, check_same, lion, placed, poisoned_gradient, sgd
from tests.zero.training import prepared as prepared_for
from zero_ext.zero import engine_of

NAME = "blocks.1.up.weight"


class Case(NamedTuple):
    """One configuration of the step. ``rolls_back`` is False where updates are made in backward for good."""

    stage: int
    offload: Mapping[str, Any] = MappingProxyType({})
    dtype: str = "fp32"
    clip: float = 0.0
    micro_batches: int = 1
    accumulation: str = "declared"
    moments: str = "fp32"
    make: Callable[[Any], torch.optim.Optimizer] = adamw

    @property
    def rolls_back(self) -> bool:
        return self.offload.get("update_mode") != "in_backward" or bool(self.clip)


HOST = {"optimizer": "host"}
ALL_HOST = {"optimizer": "host", "grads": "host"}
ALL_NVME = {"optimizer": "nvme", "grads": "nvme", "params": "nvme"}
IN_BACKWARD = {"update_mode": "in_backward"}
DELAYED = {"update_mode": "delayed"}


def muon(parameters: Any) -> torch.optim.Optimizer:
    return zero_ext.Muon(parameters, lr=1e-2)


GRADIENTS = {
    "stage 0": Case(0),
    "stage 0, clipped": Case(0, clip=0.1),
    "stage 1": Case(1),
    "stage 2": Case(2),
    "stage 3": Case(3),
    "stage 3, bf16": Case(3, dtype="bf16"),
    "stage 2, bf16, clipped": Case(2, dtype="bf16", clip=0.1),
    "stage 3, clipped": Case(3, clip=0.1),
    "stage 0, accumulated, bf16": Case(0, dtype="bf16", micro_batches=2),
    "stage 2, accumulated": Case(2, micro_batches=2),
    "stage 3, accumulated, bf16": Case(3, dtype="bf16", micro_batches=3),
    "stage 3, accumulated without an announcement": Case(3, micro_batches=2, accumulation="undeclared"),
    "stage 3, accumulated by no_sync": Case(3, micro_batches=2, accumulation="no_sync"),
    "optimizer on NVMe": Case(1, {"optimizer": "nvme"}),
    "gradients in host memory": Case(2, ALL_HOST, dtype="bf16"),
    "gradients on NVMe": Case(3, {"grads": "nvme"}),
    "gradients on NVMe, accumulated, bf16": Case(3, {"grads": "nvme"}, dtype="bf16", micro_batches=2),
    "all on NVMe": Case(3, ALL_NVME, dtype="bf16"),
    "all on NVMe, clipped": Case(3, ALL_NVME, clip=0.1),
    "half on NVMe": Case(3, {"optimizer": "nvme", "ratio": 0.5}),
    "in backward, stage 0": Case(0, IN_BACKWARD),
    "in backward, stage 3, bf16": Case(3, IN_BACKWARD, dtype="bf16"),
    "in backward, host": Case(2, {**ALL_HOST, **IN_BACKWARD}),
    "in backward, NVMe": Case(3, {**ALL_NVME, **IN_BACKWARD}),
    "in backward, accumulated": Case(3, IN_BACKWARD, micro_batches=2),
    "in backward, clipped": Case(3, IN_BACKWARD, clip=0.1),
    "in backward, NVMe, clipped, bf16": Case(3, {**ALL_NVME, **IN_BACKWARD}, dtype="bf16", clip=0.1),
    "delayed, stage 1": Case(1, {**HOST, **DELAYED}),
    "delayed, stage 3, bf16": Case(3, {**ALL_HOST, **DELAYED}, dtype="bf16"),
    "delayed, NVMe, clipped": Case(3, {"optimizer": "nvme", **DELAYED}, clip=0.1),
    "SGD": Case(3, make=sgd),
    "SGD on NVMe": Case(2, {"optimizer": "nvme"}, make=sgd),
    "Muon": Case(3, make=muon),
    "Muon on NVMe": Case(2, {"optimizer": "nvme"}, make=muon),
    "Muon in backward": Case(3, IN_BACKWARD, make=muon),
}


def lamb(parameters: Any) -> torch.optim.Optimizer:
    return zero_ext.Lamb(parameters, lr=1e-3)


WEIGHTS = {
    "stage 0": Case(0),
    "stage 1, bf16": Case(1, dtype="bf16"),
    "stage 2, clipped": Case(2, clip=0.1),
    "stage 3": Case(3),
    "8-bit moments": Case(3, dtype="bf16", moments="8bit"),
    "Lion": Case(2, make=lion),
    "LAMB": Case(3, make=lamb),
    "Muon": Case(3, make=muon),
    "Muon on NVMe": Case(3, {"optimizer": "nvme"}, make=muon),
    "SGD": Case(3, make=sgd),
    "Adam on NVMe": Case(3, {"optimizer": "nvme"}),
    "8-bit moments on NVMe": Case(3, {"optimizer": "nvme"}, moments="8bit"),
    "LAMB on NVMe": Case(3, {"optimizer": "nvme"}, make=lamb),
    "Adafactor": Case(3, make=torch.optim.Adafactor),
    "Adafactor on NVMe": Case(3, {"optimizer": "nvme"}, make=torch.optim.Adafactor),
    "SGD on NVMe": Case(3, {"optimizer": "nvme"}, make=sgd),
    "half on NVMe": Case(3, {"optimizer": "nvme", "ratio": 0.5}),
    "in backward": Case(3, IN_BACKWARD),
    "in backward, clipped": Case(3, {**HOST, **IN_BACKWARD}, clip=1e6),
    "delayed": Case(3, {**HOST, **DELAYED}),
}


@contextlib.contextmanager
def prepared(world: World, case: Case, **more: Any) -> Iterator[tuple[Any, Any]]:
    torch.manual_seed(world.seed)
    declared = case.micro_batches if case.accumulation == "declared" else 1
    more = {
        "gradient_clipping": case.clip,
        "units": {"bucket_elements": 700},
        "precision": {"dtype": case.dtype, "moments_dtype": case.moments},
        "batch": {"gradient_accumulation_steps": declared},
        **more,
    }
    with placed(case.offload) as offload:
        yield prepared_for(world, TinyModel(), case.stage, case.make, offload=offload, **more)


def backward(world: World, model: Any, case: Case, step: int) -> None:
    for micro in range(case.micro_batches):
        held_back = case.accumulation == "no_sync" and micro < case.micro_batches - 1
        with model.no_sync() if held_back else contextlib.nullcontext():
            model.backward(language_loss(model, language_batch(world.seed, step, micro, world.rank)))


def good_step(world: World, model: Any, optimizer: Any, case: Case, step: int) -> None:
    backward(world, model, case, step)
    optimizer.step()
    optimizer.zero_grad()


def one_poisoned_element(world: World, model: Any, value: float) -> contextlib.AbstractContextManager[None]:
    return poisoned_gradient(world, model, NAME, value)


@pytest.mark.parametrize("name", GRADIENTS)
@on_ranks(1, 2, by_turns=True)
def test_a_bad_gradient_on_one_rank_is_refused_on_all_and_changes_nothing(world: World, name: str) -> None:
    case = GRADIENTS[name]
    with prepared(world, case) as (model, optimizer), prepared(world, case) as (other, other_optimizer):
        for value in (float("nan"), float("inf"), -float("inf")) if case.rolls_back else (float("nan"),):
            good_step(world, model, optimizer, case, 0)
            good_step(world, other, other_optimizer, case, 0)
            with one_poisoned_element(world, model, value):
                backward(world, model, case, 1)
            norm = r" \(their norm is (nan|inf)" if case.clip and case.rolls_back else ""
            wanted = f"expected finite values, got .* in '{NAME}'{norm}"
            with pytest.raises(FloatingPointError, match=wanted) as failure:
                optimizer.step()
            if not case.rolls_back:
                break
            assert f"gradients of step {engine_of(model).steps + 1}:" in str(failure.value)
            assert "No parameter or optimizer state was changed" in str(failure.value)
            assert "optimizer.zero_grad()" in str(failure.value) and "weights" not in str(failure.value)
            optimizer.zero_grad()
        if not case.rolls_back:
            assert "Load the last checkpoint" in str(failure.value)
            with pytest.raises(RuntimeError, match="its state is damaged"):
                backward(world, model, case, 2)
            return
        good_step(world, model, optimizer, case, 2)
        good_step(world, other, other_optimizer, case, 2)
        check_same(model, other)


@pytest.mark.parametrize("clip", [0.0, 0.1])
@on_ranks(2)
def test_with_the_check_off_only_a_norm_finds_it(world: World, clip: float) -> None:
    for stage in (0, 3):
        case = Case(stage, clip=clip)
        with prepared(world, case, check_finite=False) as (model, optimizer):
            with one_poisoned_element(world, model, float("nan")):
                backward(world, model, case, 1)
            if clip:
                with pytest.raises(FloatingPointError, match=NAME):
                    optimizer.step()
                continue
            optimizer.step()
            assert zero_ext.full_state_dict(model)[NAME].isnan().any()


@pytest.mark.parametrize("change", ["scaled", "assigned", "all scaled"])
@on_ranks(1, 2)
def test_a_gradient_that_was_changed_after_backward_is_looked_at_again(world: World, change: str) -> None:
    for stage in range(1 if change == "assigned" else 4):  # sharded gradients refuse an assignment
        case = Case(stage)
        with prepared(world, case) as (model, optimizer):
            backward(world, model, case, 0)
            parameter = dict(model.module.named_parameters())[NAME]
            if change == "scaled":
                parameter.grad.mul_(float("inf"))
            elif change == "assigned":
                parameter.grad = torch.full(parameter.shape, float("nan"))
            else:
                for each in model.parameters():
                    each.grad.mul_(float("nan") if each is parameter else 0.5)
            with pytest.raises(FloatingPointError, match=f"gradients of step 1: .* in '{NAME}'"):
                optimizer.step()


@on_ranks(1, 2)
def test_an_error_names_three_parameters_and_counts_the_rest(world: World) -> None:
    case = Case(3)
    with prepared(world, case) as (model, optimizer):
        loss = language_loss(model, language_batch(world.seed, 0, 0, world.rank))
        (loss * float("nan") if world.rank == 0 else loss).backward()
        names = [name for name, _ in model.module.named_parameters()]
        with pytest.raises(FloatingPointError) as failure:
            optimizer.step()
        found = [name for name in names if f"'{name}'" in str(failure.value)]
        assert len(found) == 3 and f" and {len(names) - 3} more parameters." in str(failure.value)


@pytest.mark.parametrize("clip", [0.0, 0.1])
@on_ranks(1, 2)
def test_weights_that_are_not_finite_are_named_as_the_cause(world: World, clip: float) -> None:
    for stage, dtype in ((1, "fp32"), (3, "bf16")):
        case = Case(stage, dtype=dtype, clip=clip)
        with prepared(world, case) as (model, optimizer):
            set_element(world, dict(model.module.named_parameters())[NAME], (-1, -1), float("nan"))
            backward(world, model, case, 0)
            with pytest.raises(FloatingPointError) as failure:
                optimizer.step()
            assert f"The weights of '{NAME}' are not finite either" in str(failure.value)
            assert "checkpoint" in str(failure.value) and "zero_grad" not in str(failure.value)


def unused_row(world: World, step: int) -> int:
    """An id that no rank's batch of ``step`` has."""
    used = {int(i) for rank in range(world.size) for i in language_batch(world.seed, step, 0, rank).unique()}
    return next(row for row in range(23) if row not in used)


def set_element(world: World, parameter: Any, index: Any, value: float) -> None:
    """Set one element on all ranks."""
    with zero_ext.gathered([parameter], modifier_rank=0):
        if world.rank == 0:
            parameter.data[index] = value


@pytest.mark.parametrize("name", WEIGHTS)
@on_ranks(1, 2, by_turns=True)
def test_weights_that_are_not_finite_after_a_step_end_it_on_all_ranks(world: World, name: str) -> None:
    """Neither the loss nor a gradient depends on an embedding's row that nobody looks up."""
    case = WEIGHTS[name]
    with prepared(world, case) as (model, optimizer):
        good_step(world, model, optimizer, case, 0)
        set_element(world, model.module.embedding.weight, (unused_row(world, 1), 0), float("inf"))
        backward(world, model, case, 1)
        wanted = r"weights after step 2: expected finite values, .* in 'embedding\.weight'\."
        with pytest.raises(FloatingPointError, match=wanted):
            optimizer.step()
            model.finish_update()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"its state is damaged: .*'embedding\.weight'"):
            backward(world, model, case, 2)


@on_ranks(1, 2)
def test_an_update_that_divides_zero_by_zero_is_found(world: World) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3, eps=0.0, weight_decay=0.0)

    for offload in ({}, {"optimizer": "nvme"}):
        case = Case(3, offload, make=make)
        with prepared(world, case) as (model, optimizer):
            backward(world, model, case, 1)
            with pytest.raises(FloatingPointError, match=r"weights after step 1: .* in 'embedding\.weight'"):
                optimizer.step()


@on_ranks(1, 2)
def test_a_moment_that_overflows_is_found(world: World) -> None:
    """The square of a gradient is infinite in fp32 while the gradient and the weight are finite."""
    case = Case(2)
    with prepared(world, case) as (model, optimizer):
        with one_poisoned_element(world, model, 1e25):
            backward(world, model, case, 1)
        with pytest.raises(FloatingPointError, match=f"moments after step 1: .* in '{NAME}'"):
            optimizer.step()


@on_ranks(1, 2)
def test_clipping_rolls_back_a_moment_that_overflowed_in_backward(world: World) -> None:
    """The update on trial overflows, the clipped one does not."""
    case = Case(3, {**HOST, **IN_BACKWARD}, clip=1.0)
    with prepared(world, case) as (model, optimizer):
        with one_poisoned_element(world, model, 1e25):
            backward(world, model, case, 1)
        optimizer.step()
        assert optimizer.rolled_back_steps == 1
        optimizer.zero_grad()
        good_step(world, model, optimizer, case, 2)


@on_ranks(1, 2)
def test_the_last_overflow_of_fp16_is_named(world: World) -> None:
    for stage, make in ((0, adamw), (3, adamw), (3, muon)):
        case = Case(stage, dtype="fp16", make=make)
        scale = {"initial_power": 1, "minimum": 1.0, "hysteresis": 1}
        with prepared(world, case, loss_scale=scale) as (model, optimizer):
            for _ in range(2):
                with one_poisoned_element(world, model, float("inf")):
                    backward(world, model, case, 0)
                if not optimizer.skipped_steps:
                    optimizer.step()
                    assert optimizer.step_was_skipped
                    optimizer.zero_grad()
            with pytest.raises(FloatingPointError, match=f"loss_scale.minimum.*infinity in '{NAME}'"):
                optimizer.step()
