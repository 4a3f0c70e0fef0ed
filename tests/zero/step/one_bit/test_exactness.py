"""Where nothing is lost, the one-bit family is Adam without bias correction, its variance frozen."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.step.one_bit.simulation import simulate
from tests.zero.step.one_bit.training import (
    COURSES,
    branching_loss,
    check_same,
    layouts,
    parameters,
    prepared,
    train,
)


class Slopes(nn.Module):
    """A loss that is linear: the gradient of every element is 1 or -1, at random."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(4 * 8192, generator=generator))
        self.register_buffer("slope", torch.randint(0, 2, (4 * 8192,), generator=generator) * 2.0 - 1)

    def forward(self) -> torch.Tensor:
        return (self.weight * self.slope).sum()


def frozen_adam(
    weight: torch.Tensor, gradients: list[torch.Tensor], freeze: int, lr: float, betas: tuple[float, float]
) -> torch.Tensor:
    """Adam without bias correction in float64, the variance frozen after ``freeze`` steps."""
    weight, momentum, variance = weight.double(), torch.zeros(1).double(), torch.zeros(1).double()
    for step, gradient in enumerate(gradients):
        momentum = betas[0] * momentum + (1 - betas[0]) * gradient.double()
        if step < freeze:
            variance = betas[1] * variance + (1 - betas[1]) * gradient.double().square()
        weight = weight - lr * momentum / (variance.sqrt() + 1e-8)
    return weight


@pytest.mark.parametrize("stage", [0, 1])
@on_ranks(1, 2, 4)
def test_without_loss_it_is_adam_with_its_variance_frozen(world: World, stage: int) -> None:
    model = Slopes(world.seed)
    first, slope = model.weight.detach().clone(), model.slope.clone()
    optimizer = zero_ext.OneBitAdam(
        model.parameters(), lr=2**-7, betas=(0.5, 0.75), freeze_step=4, variance_floor=0.0
    )
    prepared_model, stepped = zero_ext.prepare(
        model, optimizer, {"stage": stage, "timeout_seconds": 120.0}, process_group=world.group
    )
    for _ in range(12):
        prepared_model().backward()
        stepped.step()
        stepped.zero_grad()
    wanted = frozen_adam(first, [slope] * 12, 4, 2**-7, (0.5, 0.75))
    found = parameters(prepared_model)["weight"]
    assert (found.double() - wanted).abs().max() <= 2e-6
    # And it is not Adam that goes on to learn its variance.
    assert (found.double() - frozen_adam(first, [slope] * 12, 12, 2**-7, (0.5, 0.75))).abs().max() > 1e-3


@pytest.mark.parametrize("stage", [0, 1])
@on_ranks(1, 3)
def test_an_infinite_freeze_step_is_adam_without_bias_correction(world: World, stage: int) -> None:
    course = COURSES["1-bit Adam"]._replace(stage=stage, policy={"freeze_step": math.inf}, steps=5)
    model, optimizer, twin = prepared(world, course, world.seed)
    train(world, course, world.seed, model, optimizer, range(course.steps))

    def loss(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
        return branching_loss(world.seed, model, step, micro, rank)

    check_same(parameters(model), simulate(twin, layouts(model), world.size, course, loss)[1][world.rank])


@on_ranks(2)
def test_without_correction_the_first_step_is_as_in_the_formula(world: World) -> None:
    torch.manual_seed(world.seed)
    model = nn.Linear(37, 11)
    first = model.weight.detach().clone()
    optimizer = zero_ext.OneBitAdam(model.parameters(), lr=0.1, eps=1e-3, betas=(0.9, 0.99))
    prepared_model, stepped = zero_ext.prepare(model, optimizer, {"stage": 1}, process_group=world.group)
    (prepared_model(torch.ones(1, 37)).sum() * 3).backward()
    stepped.step()
    update = (1 - 0.9) * 3.0 / (math.sqrt((1 - 0.99) * 9.0) + 1e-3)
    assert torch.allclose(parameters(prepared_model)["weight"], first - 0.1 * update, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1])
@on_ranks(2)
def test_rare_gradients_do_not_make_steps_without_bounds(world: World, stage: int) -> None:
    torch.manual_seed(world.seed)
    embedding = nn.Embedding(50, 16)
    first = embedding.weight.detach().clone()
    optimizer = zero_ext.OneBitAdam(embedding.parameters(), lr=1e-3, betas=(0.9, 0.99), freeze_step=5)
    model, stepped = zero_ext.prepare(embedding, optimizer, {"stage": stage}, process_group=world.group)
    for step in range(40):
        words = torch.randint(20 if step % 10 else 50, (64,))  # those above are rare, some never come
        model(words.remainder(45)).square().sum().backward()
        stepped.step()
        stepped.zero_grad()
    moved = (parameters(model)["weight"] - first).abs().max()
    assert moved < 40 * 1e-3 * 10
