"""The engine's one-bit family against all ranks simulated in one process: the same bits."""

from __future__ import annotations

import functools

import pytest

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


@pytest.mark.parametrize("name", COURSES)
@on_ranks(2, 3, 4)
def test_every_rank_equals_the_simulation(world: World, name: str) -> None:
    course = COURSES[name]
    model, optimizer, twin = prepared(world, course, world.seed)
    losses = train(world, course, world.seed, model, optimizer, range(course.steps))
    wanted_losses, wanted = simulate(
        twin, layouts(model), world.size, course, functools.partial(branching_loss, world.seed)
    )
    assert losses == wanted_losses[world.rank]
    check_same(parameters(model), wanted[world.rank])
