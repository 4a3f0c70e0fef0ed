"""Mixtures of experts on ranks that route differently, with no unit named: as one process."""

from __future__ import annotations

import copy

import pytest
import torch

import zero_ext
from tests.integrations.transformers.mixtures import (
    FAMILIES,
    LISTED,
    losses_alone,
    mean_losses,
    mixture_of,
    optimizer_of,
    routed_apart,
)
from tests.integrations.transformers.models import enter
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World

STEPS, DEFAULT = 3, "grouped_mm"
# Stages, and how transformers multiplies by experts. "eager" reads the weights of one expert at a time.
CASES = [(1, DEFAULT), (2, DEFAULT), (3, DEFAULT), (3, "eager")]


@on_ranks(2, by_turns=True)
@pytest.mark.parametrize("family", [*FAMILIES, *LISTED])
def test_ranks_that_route_differently_train_as_one_process(world: World, family: str) -> None:
    enter(world)
    made = mixture_of(family, world.seed)
    words = routed_apart(made, world.seed, world.size, STEPS)
    alone = copy.deepcopy(made)
    expected = losses_alone(alone, words)
    for stage, experts in CASES:
        model = copy.deepcopy(made)
        if experts != DEFAULT and family not in LISTED:
            model.set_experts_implementation(experts)
        model, optimizer = zero_ext.prepare(
            model, optimizer_of(model), {"stage": stage}, process_group=world.group
        )
        losses = mean_losses(world, model, optimizer, words)
        for mean, one in zip(losses, expected, strict=True):
            assert abs(mean - one) <= 1e-5 * abs(one), f"stage {stage}, seed {world.seed}"
        full = zero_ext.full_state_dict(model)
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(full[name], value, rtol=1e-4, atol=1e-4, msg=f"{name}, {stage}")
