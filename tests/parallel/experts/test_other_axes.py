"""Experts on different ranks inside pipeline stages, and beside split tensors: as one process."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel.experts.mixtures import EXPERTS, SAMPLES, WIDTH, WORDS, adamw, batches, expert
from tests.parallel.pipeline.toy_stages import split_blocks
from zero_ext.parallel import make_mesh
from zero_ext.parallel.experts import MixtureOfExperts
from zero_ext.parallel.pipeline import LayerSpec, Pipeline, PipelineModule
from zero_ext.zero import engine_of


class Block(nn.Module):
    """Two residual layers, a plain one and a mixture."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.mixture = MixtureOfExperts(WIDTH, expert, EXPERTS, mesh=mesh)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.narrow(torch.tanh(self.wide(hidden)))
        return hidden + self.mixture(hidden).hidden


def mean_loss(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())


@functools.cache
def mesh_of(axis: str) -> DeviceMesh:
    return make_mesh({axis: 2, "ep": 2}, device_type="cpu")


class Course:
    """A pipeline of one stage or two, its blocks split where the mesh has "tp", and its steps."""

    def __init__(self, seed: int, mesh: DeviceMesh, stage: int) -> None:
        blocks = [LayerSpec(Block, mesh) for _ in range(2)]
        layers = [LayerSpec(nn.Embedding, WORDS, WIDTH), *blocks, LayerSpec(nn.Linear, WIDTH, WORDS)]
        torch.manual_seed(seed)
        module = PipelineModule(layers, mesh, loss=mean_loss, split="uniform")
        split_blocks(module, mesh, Block)
        config = {"stage": stage, "gradient_clipping": 0.5, "timeout_seconds": 120.0}
        self.model, optimizer = zero_ext.prepare(module, adamw(module), config, process_group=mesh)
        self.pipeline = Pipeline(self.model, optimizer, micro_batches=2)

    def steps(self, seed: int, first: int, last: int) -> list[tuple[float, Any]]:
        """Losses and norms."""
        engine = engine_of(self.model)
        share, records = SAMPLES // engine.world_size, []
        own = slice(share * engine.rank, share * (engine.rank + 1))
        for words, wanted in batches(seed, last)[first:]:
            loss = float(self.pipeline.train_batch(words[own], targets=wanted[own]))
            records.append((loss, engine.grad_norm))
        return records


@on_ranks(4)
@pytest.mark.parametrize(("axis", "stage"), [("pp", 2), ("tp", 3)])
def test_steps_and_checkpoints_are_those_of_one_process(world: World, axis: str, stage: int) -> None:
    folder = str(world.everyone(tempfile.mkdtemp() if world.rank == 0 else None)[0])
    single = DeviceMesh("cpu", torch.tensor([[dist.get_rank()]]), mesh_dim_names=("pp", "dp"))
    wanted = Course(world.seed, single, 0).steps(world.seed, 0, 5)
    course = Course(world.seed, mesh_of(axis), stage)
    torch.testing.assert_close(course.steps(world.seed, 0, 3), wanted[:3], rtol=1e-5, atol=0)
    zero_ext.save_checkpoint(folder, course.model).wait()
    then = Course(world.seed + 1, single, 1)
    zero_ext.load_checkpoint(folder, then.model)
    torch.testing.assert_close(then.steps(world.seed, 3, 5), wanted[3:], rtol=1e-5, atol=0)
