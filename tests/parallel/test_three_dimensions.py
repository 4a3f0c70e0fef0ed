"""Pipeline stages, split tensors and ZeRO together on eight ranks: as one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import zero_ext
from tests.multi.pool import RankPool
from tests.multi.rank import World
from tests.parallel.pipeline.toy_stages import course_of, mesh_of, train_alone
from tests.parallel.training import (
    CLIP,
    assert_same_steps,
    assert_same_values,
    batches,
    mesh_of_one,
)

RANKS, SAMPLES, STEPS = 8, 16, 10


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    pool = RankPool(RANKS)
    yield pool
    pool.close()


def two_by_two_by_two(world: World, stage: int) -> None:
    course = course_of(world.seed, mesh_of(2, 2), stage)
    records = course.steps(batches(world.seed, STEPS, SAMPLES))
    alone = train_alone(world.seed, SAMPLES, CLIP, STEPS)
    assert_same_steps(tuple(records), (alone.losses, alone.norms))
    assert_same_values(zero_ext.full_state_dict(course.model), alone.parameters)


def saved_and_loaded(world: World, stage: int) -> None:
    folder, data = world.shared_folder(), batches(world.seed, 6, SAMPLES)
    first = course_of(world.seed, mesh_of(2, 2), stage)
    first.steps(data[:3])
    zero_ext.save_checkpoint(folder, first.model).wait()
    wanted = train_alone(world.seed, SAMPLES, CLIP, 6).losses[3:]
    for mesh, stage_then in ((mesh_of(4, 2), 1), (mesh_of_one(), 0)):
        then = course_of(world.seed + 1, mesh, stage_then)
        zero_ext.load_checkpoint(folder, then.model)
        assert_same_steps(then.steps(data[3:]).losses, wanted)


@pytest.mark.by_turns()
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_stages_two_tp_ranks_two_replicas(eight: RankPool, stage: int) -> None:
    run(eight, two_by_two_by_two, stage=stage)


def test_a_checkpoint_of_eight_ranks_loads_in_other_layouts(eight: RankPool) -> None:
    run(eight, saved_and_loaded, stage=3)


def run(pool: RankPool, body: Any, **arguments: Any) -> None:
    pool.run(RANKS, f"{body.__module__}:{body.__name__}", arguments)
