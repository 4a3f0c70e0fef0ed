"""Checkpoints of pipelines: saved under one layout, loaded under any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel.pipeline.toy_stages import WIDTH, course_of, mesh_of, specifications, train_alone
from tests.parallel.training import (
    CLIP,
    Course,
    assert_same_steps,
    assert_same_values,
    batches,
    mesh_of_one,
)
from zero_ext.parallel.pipeline import LayerSpec

STEPS, SAMPLES = 6, 16


class Counted(nn.Module):
    """A layer with a buffer that its calls change."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return hidden * self.weight


@on_ranks(4, by_turns=True)
@pytest.mark.parametrize(("saved", "loaded"), [(2, 4), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("stages", [(2, 3), (3, 1)])
def test_a_run_goes_on_in_another_layout(
    world: World, saved: int, loaded: int, stages: tuple[int, int]
) -> None:
    folder, data = world.shared_folder(), batches(world.seed, STEPS, SAMPLES)
    alone = train_alone(world.seed, SAMPLES, CLIP, STEPS)
    first = course_of(world.seed, mesh_of(saved), stages[0])
    losses = first.steps(data[:3]).losses
    zero_ext.save_checkpoint(folder, first.model, client_state={"seed": world.seed}).wait()
    then = course_of(world.seed + 1, mesh_of(loaded), stages[1])
    found = zero_ext.load_checkpoint(folder, then.model)
    assert (found.step, found.client_state) == (3, {"seed": world.seed})
    assert_same_steps(losses + then.steps(data[3:]).losses, alone.losses)
    assert_same_values(zero_ext.full_state_dict(then.model), alone.parameters)


@on_ranks(4)
@pytest.mark.parametrize("position", [3, 4], ids=["first stage", "last stage"])
def test_one_rank_resumes(world: World, position: int) -> None:
    def counted(seed: int, mesh: DeviceMesh, stage: int) -> Course:
        layers: list[Any] = specifications()
        layers[position] = LayerSpec(Counted)
        return course_of(seed, mesh, stage, layers)

    folder, data = world.shared_folder(), batches(world.seed, STEPS, SAMPLES)
    first = counted(world.seed, mesh_of(2), 2)
    first.steps(data[:3])
    zero_ext.save_checkpoint(folder, first.model).wait()
    wanted = first.steps(data[3:])
    then = counted(world.seed + 1, mesh_of_one(), 0)
    zero_ext.load_checkpoint(folder, then.model)
    # The buffer, which counts the micro-batches of a rank, came from the stage that has it.
    assert int(then.model.module.layers[str(position)].calls) == 12
    assert_same_steps(then.steps(data[3:]).losses, wanted.losses)


@on_ranks(4)
def test_another_model_is_refused_on_all_ranks(world: World) -> None:
    folder = world.shared_folder()
    first = course_of(world.seed, mesh_of(2), 1)
    zero_ext.save_checkpoint(folder, first.model, step=0).wait()
    other = course_of(world.seed, mesh_of(2), 1, specifications()[:-3] + specifications()[-2:])
    before = zero_ext.full_state_dict(other.model)
    with pytest.raises(ValueError, match="does not fit this model"):
        zero_ext.load_checkpoint(folder, other.model)
    for name, value in zero_ext.full_state_dict(other.model).items():
        assert torch.equal(value, before[name])
    assert len(list(folder.glob("step-*"))) == 1
