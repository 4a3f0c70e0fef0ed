"""Pipeline stages, split tensors and ZeRO together on eight ranks: as one process."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import zero_ext
from tests.multi.pool import RankPool
from tests.multi.rank import World
from tests.parallel.pipeline.toy_stages import (
    Block,
    adamw,
    batches,
    mean_loss,
    specifications,
    split_blocks,
    train_alone,
)
from zero_ext.parallel import make_mesh
from zero_ext.parallel.pipeline import Pipeline, PipelineModule
from zero_ext.zero import engine_of

RANKS, SAMPLES, STEPS = 8, 16, 10


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    pool = RankPool(RANKS)
    yield pool
    pool.close()


@functools.cache
def mesh_of(pp: int, tp: int) -> DeviceMesh:
    """All ranks; made once in a process."""
    return make_mesh(pp=pp, tp=tp, device_type="cpu")


class Course:
    """A pipeline whose blocks are split, on a mesh."""

    def __init__(self, seed: int, mesh: DeviceMesh, stage: int) -> None:
        torch.manual_seed(seed)
        module = PipelineModule(specifications(), mesh, loss=mean_loss)
        split_blocks(module, mesh, Block)
        config = {"stage": stage, "gradient_clipping": 0.5, "timeout_seconds": 120.0}
        self.model, optimizer = zero_ext.prepare(
            module, adamw(module.parameters()), config, process_group=mesh
        )
        self.pipeline = Pipeline(self.model, optimizer, micro_batches=4)
        self.data = mesh["dp"]

    def steps(self, seed: int, first: int, last: int) -> tuple[list[float], list[float | None]]:
        share = SAMPLES // self.data.size()
        own = slice(share * self.data.get_local_rank(), share * (self.data.get_local_rank() + 1))
        losses, norms = [], []
        for words, wanted in list(batches(seed, last, SAMPLES))[first:]:
            losses.append(float(self.pipeline.train_batch(words[own], targets=wanted[own])))
            norms.append(engine_of(self.model).grad_norm)
        return losses, norms


def two_by_two_by_two(world: World, stage: int) -> None:
    course = Course(world.seed, mesh_of(2, 2), stage)
    losses, norms = course.steps(world.seed, 0, STEPS)
    alone = train_alone(world.seed, SAMPLES, 0.5, STEPS)
    torch.testing.assert_close(losses, alone.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(norms, alone.norms, rtol=1e-5, atol=0)
    for name, value in zero_ext.full_state_dict(course.model).items():
        torch.testing.assert_close(value, alone.parameters[name], rtol=1e-4, atol=1e-5)


def saved_and_loaded(world: World, stage: int) -> None:
    folder = str(world.everyone(tempfile.mkdtemp() if world.rank == 0 else None)[0])
    first = Course(world.seed, mesh_of(2, 2), stage)
    first.steps(world.seed, 0, 3)
    zero_ext.save_checkpoint(folder, first.model).wait()
    wanted = train_alone(world.seed, SAMPLES, 0.5, 6).losses[3:]
    single = DeviceMesh("cpu", torch.tensor([[dist.get_rank()]]), mesh_dim_names=("pp", "dp"))
    for mesh, stage_then in ((mesh_of(4, 2), 1), (single, 0)):
        then = Course(world.seed + 1, mesh, stage_then)
        zero_ext.load_checkpoint(folder, then.model)
        losses, _ = then.steps(world.seed, 3, 6)
        torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_stages_two_tp_ranks_two_replicas(eight: RankPool, stage: int) -> None:
    run(eight, two_by_two_by_two, stage=stage)


def test_a_checkpoint_of_eight_ranks_loads_in_other_layouts(eight: RankPool) -> None:
    run(eight, saved_and_loaded, stage=3)


def run(pool: RankPool, body: Any, **arguments: Any) -> None:
    pool.run(RANKS, f"{body.__module__}:{body.__name__}", arguments)
