"""The one-bit family on an accelerator, stood in for: the bits of the host."""

from __future__ import annotations

import pytest

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.compressed.training import COURSES, check_same, parameters, prepared, train


@pytest.mark.parametrize(
    "name", ["1-bit Adam", "1-bit Adam, moments sharded, bf16", "0/1 Adam", "1-bit LAMB"]
)
@on_ranks(2, stand_in=True)
def test_a_device_has_the_bits_of_the_host(world: World, name: str) -> None:
    course = COURSES[name]
    model, optimizer, _ = prepared(world, course, world.seed)
    losses = train(world, course, world.seed, model, optimizer, range(course.steps))
    other, other_optimizer, _ = prepared(world, course, world.seed, device="stand_in")
    assert train(world, course, world.seed, other, other_optimizer, range(course.steps)) == losses
    found = {key: value.cpu() for key, value in parameters(other).items()}
    check_same(found, parameters(model))
