"""Checkpoints of pipelines: saved under one layout, loaded under any other."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel.pipeline.toy_stages import (
    WIDTH,
    adamw,
    batches,
    mean_loss,
    mesh_of,
    specifications,
    train_alone,
)
from zero_ext.parallel.pipeline import LayerSpec, Pipeline, PipelineModule

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


def layers() -> list[Any]:
    made = specifications()
    made[3] = LayerSpec(Counted)
    return made


class Course:
    """A pipeline on a mesh, and its steps from one to another of :func:`batches`."""

    def __init__(self, seed: int, mesh: DeviceMesh, stage: int, specified: list[Any]) -> None:
        torch.manual_seed(seed)
        module = PipelineModule(specified, mesh, loss=mean_loss)
        config = {"stage": stage, "gradient_clipping": 0.5}
        self.model, self.optimizer = zero_ext.prepare(
            module, adamw(module.parameters()), config, process_group=mesh
        )
        self.pipeline = Pipeline(self.model, self.optimizer, micro_batches=4)
        self.data, self.seed = mesh["dp"], seed

    def steps(self, first: int, last: int) -> list[float]:
        share = SAMPLES // self.data.size()
        own = slice(share * self.data.get_local_rank(), share * (self.data.get_local_rank() + 1))
        found = list(batches(self.seed, last, SAMPLES))[first:]
        return [float(self.pipeline.train_batch(words[own], targets=wanted[own])) for words, wanted in found]


def shared_folder(world: World) -> str:
    return str(world.everyone(tempfile.mkdtemp() if world.rank == 0 else None)[0])


@on_ranks(4)
@pytest.mark.parametrize(("saved", "loaded"), [(2, 4), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("stages", [(2, 3), (3, 1)])
def test_a_run_goes_on_in_another_layout(
    world: World, saved: int, loaded: int, stages: tuple[int, int]
) -> None:
    folder = shared_folder(world)
    alone = train_alone(world.seed, SAMPLES, 0.5, STEPS)
    first = Course(world.seed, mesh_of(saved), stages[0], specifications())
    losses = first.steps(0, 3)
    zero_ext.save_checkpoint(folder, first.model, client_state={"seed": world.seed}).wait()
    then = Course(world.seed + 1, mesh_of(loaded), stages[1], specifications())
    found = zero_ext.load_checkpoint(folder, then.model)
    assert (found.step, found.client_state) == (3, {"seed": world.seed})
    then.seed = world.seed
    losses += then.steps(3, STEPS)
    torch.testing.assert_close(losses, alone.losses, rtol=1e-5, atol=0)
    for name, value in zero_ext.full_state_dict(then.model).items():
        torch.testing.assert_close(value, alone.parameters[name], rtol=1e-4, atol=1e-5)


@on_ranks(4)
def test_one_rank_resumes(world: World) -> None:
    folder = shared_folder(world)
    first = Course(world.seed, mesh_of(2), 2, layers())
    first.steps(0, 3)
    zero_ext.save_checkpoint(folder, first.model).wait()
    wanted = first.steps(3, STEPS)
    single = DeviceMesh("cpu", torch.tensor([[world.rank]]), mesh_dim_names=("pp", "dp"))
    then = Course(world.seed + 1, single, 0, layers())
    zero_ext.load_checkpoint(folder, then.model)
    then.seed = world.seed
    # The buffer, which counts the micro-batches of a rank, came from the stage that has it.
    assert int(then.model.module.layers["3"].calls) == 12
    torch.testing.assert_close(then.steps(3, STEPS), wanted, rtol=1e-5, atol=0)


@on_ranks(4)
def test_another_model_is_refused_on_all_ranks(world: World) -> None:
    folder = shared_folder(world)
    first = Course(world.seed, mesh_of(2), 1, specifications())
    zero_ext.save_checkpoint(folder, first.model, step=0).wait()
    other = Course(world.seed, mesh_of(2), 1, specifications()[:-3] + specifications()[-2:])
    before = zero_ext.full_state_dict(other.model)
    with pytest.raises(ValueError, match="does not fit this model"):
        zero_ext.load_checkpoint(folder, other.model)
    assert all(
        torch.equal(value, before[name]) for name, value in zero_ext.full_state_dict(other.model).items()
    )
    assert len(list(Path(folder).glob("step-*"))) == 1
