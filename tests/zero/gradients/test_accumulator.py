"""Gradients between backward and step, as the usual lines of a loop see them: the true ones, or an error."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import WIDTH, TinyModel, feature_batch, language_batch, language_loss
from tests.zero.training import check_near, plain_backward, prepared, sgd

STAGES = [0, 1, 2, 3]


def after_backward(world: World, stage: int, **more: Any) -> tuple[Any, Any, nn.Module]:
    """A prepared model and its optimizer with gradients, and a plain twin with the true ones."""
    torch.manual_seed(world.seed)
    model = TinyModel(layers=2)
    twin = copy.deepcopy(model)
    model, optimizer = prepared(world, model, stage, sgd, **more)
    language_loss(model, language_batch(world.seed, 0, 0, world.rank)).backward()
    plain_backward(world, twin, 0)
    return model, optimizer, twin


def close(one: torch.Tensor | float, two: torch.Tensor | float) -> None:
    torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(two), rtol=1e-5, atol=1e-7)


def total_norm(net: nn.Module, norm_type: float = 2.0) -> torch.Tensor:
    return nn.utils.get_total_norm([each.grad for each in net.parameters()], norm_type)


def every_stage(world: World, **more: Any) -> Iterator[tuple[Any, Any, nn.Module]]:
    """The result of :func:`after_backward` in each stage."""
    for stage in STAGES:
        yield after_backward(world, stage, **more)


def check_step(model: Any, optimizer: Any, twin: nn.Module) -> None:
    """One step on both sides gives the same parameters."""
    optimizer.step()
    sgd(twin.parameters()).step()
    check_near(model, twin, 1e-5, 1e-5)


@on_ranks(1, 2, 3, by_turns=True)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clip_grad_norm(world: World, norm_type: float) -> None:
    for stage in STAGES:
        for foreach in ("ours", None, True, False):
            model, optimizer, twin = after_backward(world, stage)
            if foreach == "ours":
                norm = model.clip_grad_norm_(0.05, norm_type)
            else:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type, foreach=foreach)
            close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 0.05, norm_type))
            check_step(model, optimizer, twin)


class Pair(nn.Module):
    """Two layers side by side in one block, so that stage 3 gathers both or none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(features), self.second(features)


def pair_loss(world: World, model: nn.Module, rank: int) -> torch.Tensor:
    """Of both layers on rank 0, of the first one on the others."""
    one, two = model(feature_batch(world.seed, 0, 0, rank))
    return one.square().mean() + two.square().mean() if rank == 0 else one.square().mean()


@on_ranks(2, 3)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_torch_clips_alike_on_ranks_that_used_other_parameters(world: World, norm_type: float) -> None:
    for stage in STAGES:
        model: Any = nn.Sequential(Pair())
        twin = copy.deepcopy(model)
        model, optimizer = prepared(world, model, stage, sgd)
        pair_loss(world, model, world.rank).backward()
        for rank in range(world.size):
            (pair_loss(world, twin, rank) / world.size).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type)
        close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 0.01, norm_type))
        check_step(model, optimizer, twin)


@on_ranks(2)
def test_norms_of_unreduced_gradients_that_differ_between_ranks_are_refused(world: World) -> None:
    for stage in STAGES:
        model: Any = nn.Sequential(Pair())
        model, _ = prepared(world, model, stage, sgd)
        with model.no_sync():
            pair_loss(world, model, world.rank).backward()
        with pytest.raises(RuntimeError, match=r"model\.clip_grad_norm_"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)


@on_ranks(1, 2)
def test_norms_follow_gradients_that_were_written_to(world: World) -> None:
    """Where a rank holds whole gradients they are plain tensors, and nothing tells of a write."""
    for model, optimizer, twin in every_stage(world, gradient_clipping=0.01):
        for norm_type in (2.0, float("inf")):
            before = model.clip_grad_norm_(1e9, norm_type)
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)
            close(model.clip_grad_norm_(1e9, norm_type), 0.5 * before)
        for net in (model, twin):
            nn.utils.clip_grad_norm_(net.parameters(), 0.005)
        check_step(model, optimizer, twin)


@on_ranks(1, 2)
def test_a_gradient_that_is_not_finite_shows_in_every_norm(world: World) -> None:
    for model, _, _ in every_stage(world):
        model.norm.bias.grad.mul_(float("nan"))
        for norm_type in (2.0, float("inf")):
            assert model.clip_grad_norm_(1.0, norm_type).isnan()
            assert nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type).isnan()


@on_ranks(1, 2, 3)
def test_norms_and_full_gradients(world: World) -> None:
    for model, _, twin in every_stage(world):
        for norm_type in (2.0, float("inf")):
            close(total_norm(model, norm_type), total_norm(twin, norm_type))
        for parameter, true in zip(model.parameters(), twin.parameters(), strict=True):
            close(parameter.grad.norm(), true.grad.norm())
            close(parameter.grad.detach().norm(2), true.grad.norm(2))
            close(parameter.grad.data.norm(2).item(), true.grad.data.norm(2).item())
            close(torch.linalg.vector_norm(parameter.grad, float("inf")), true.grad.abs().max())
            close(torch.norm(parameter.grad), torch.norm(true.grad))
            close(zero_ext.full_gradient(parameter), true.grad)
        model.zero_grad()
        assert zero_ext.full_gradient(model.head.weight) is None


@on_ranks(2)
@pytest.mark.parametrize("norm_type", [1.0, 3.0, 0.0])
def test_other_norms(world: World, norm_type: float) -> None:
    for model, optimizer, twin in every_stage(world):
        with pytest.raises(ValueError, match="norm_type: expected 2 or inf"):
            model.clip_grad_norm_(1.0, norm_type)
        close(*(nn.utils.clip_grad_norm_(net.parameters(), 0.1, norm_type) for net in (model, twin)))
        check_step(model, optimizer, twin)


@on_ranks(1, 2)
def test_scaling_in_place(world: World) -> None:
    """What GradScaler, gradient averaging and hand-written clipping do."""
    for model, optimizer, twin in every_stage(world):
        for net in (model, twin):
            for number, parameter in enumerate(net.parameters()):
                if number % 3 == 0:
                    parameter.grad.mul_(0.5)
                elif number % 3 == 1:
                    parameter.grad.div_(torch.tensor(4.0))
                else:
                    parameter.grad.data.mul_(torch.tensor(2.0))
            torch._foreach_mul_([parameter.grad for parameter in net.parameters()], 3.0)
        close(total_norm(model), total_norm(twin))
        check_step(model, optimizer, twin)


@on_ranks(1, 2)
def test_setting_gradients_to_none_or_zero(world: World) -> None:
    for model, optimizer, twin in every_stage(world):
        for net in (model, twin):
            net.head.weight.grad = None
            net.norm.bias.grad.zero_()
        check_step(model, optimizer, twin)
    for model, optimizer, twin in every_stage(world):
        for net in (model, twin):
            for parameter in net.parameters():
                parameter.grad = None
            language_loss(net, language_batch(world.seed, 1, 0, 0)).backward()
        check_step(model, optimizer, twin)


@on_ranks(1, 2)
@pytest.mark.parametrize("who", ["optimizer", "model", "module"])
def test_zero_grad_without_none(world: World, who: str) -> None:
    """Zeros count as gradients: weight decay acts and moments move, as in torch."""
    for model, optimizer, twin in every_stage(world):
        clear = {"optimizer": optimizer, "model": model, "module": model.module}[who].zero_grad
        clear(set_to_none=False)
        assert all(parameter.grad is not None for parameter in model.parameters())
        twin.zero_grad(set_to_none=False)
        check_step(model, optimizer, twin)
        plain_backward(world, model, 1)
        clear()
        assert all(parameter.grad is None for parameter in model.parameters())


@on_ranks(1)
def test_a_gradient_assigned_before_backward_counts_alone(world: World) -> None:
    """The pass after it adds to it, and to nothing of the step before."""
    for model, optimizer, twin in every_stage(world):
        plain = sgd(twin.parameters())
        for number in range(3):
            for each, stepping in ((model, optimizer), (twin, plain)):
                stepping.step()
                stepping.zero_grad()
                each.blocks[0].up.bias.grad = torch.full((2 * WIDTH + 1,), 0.1 * number)
                language_loss(each, language_batch(world.seed, number, 1, 0)).backward()
        check_near(model, twin, 1e-5, 1e-5)


@on_ranks(1, 2)
def test_grad_scaler(world: World) -> None:
    """torch's own GradScaler around an fp32 model: unscale_ acts on true gradients."""
    for model, optimizer, twin in every_stage(world):
        optimizer.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        scaler.scale(language_loss(model, language_batch(world.seed, 0, 0, world.rank))).backward()
        scaler.unscale_(optimizer)
        close(*(nn.utils.clip_grad_norm_(net.parameters(), 1.0) for net in (model, twin)))
        check_step(model, optimizer, twin)


@on_ranks(2)
def test_gradients_accumulate_over_steps_without_zero_grad(world: World) -> None:
    """torch keeps adding to gradients until zero_grad; so do we."""
    for model, optimizer, twin in every_stage(world):
        plain = sgd(twin.parameters())
        optimizer.step()
        plain.step()
        language_loss(model, language_batch(world.seed, 1, 0, world.rank)).backward()
        plain_backward(world, twin, 1)
        optimizer.step()
        plain.step()
        check_near(model, twin, 1e-5, 1e-5)


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", STAGES)
def test_small_gradients_of_a_unit_are_packed_by_one_call_and_large_ones_as_they_come(
    world: World, stage: int
) -> None:
    from zero_ext.zero.gradients import accumulator

    packed: list[int] = []
    original = accumulator.ops.pack_

    def pack(flat: torch.Tensor, tensors: list[torch.Tensor], offsets: list[int]) -> None:
        packed.append(len(tensors))
        original(flat, tensors, offsets)

    def calls_with(large: int) -> list[int]:
        packed.clear()
        with mock.patch.object(accumulator, "_LARGE_BYTES", large):
            model, optimizer, twin = after_backward(world, stage)
        check_step(model, optimizer, twin)
        return [count for count in packed if count]

    with mock.patch.object(accumulator.ops, "pack_", pack):
        at_once = calls_with(1 << 20)
        as_they_come = calls_with(0)
    # Those of a unit of several parameters, by one call; without waiting, each by its own.
    assert max(at_once) > 1
    assert set(as_they_come) == {1}
