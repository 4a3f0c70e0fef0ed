"""A small model as a list of layers, its steps in a pipeline, and the same steps in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zero_ext
from tests.parallel import training
from tests.parallel.training import WORDS, Course, alone, batches, mean_loss, mesh_of_one
from zero_ext.parallel.pipeline import LayerSpec, Pipeline, PipelineModule, TiedLayerSpec
from zero_ext.zero import Engine

WIDTH, BLOCKS = 8, 6


class Block(nn.Module):
    """A residual block; ``dropped`` of its hidden values are left out in training."""

    def __init__(self, dropped: float = 0.0) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropped)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.narrow(self.dropout(torch.tanh(self.wide(hidden))))


def split_blocks(module: PipelineModule, mesh: DeviceMesh, kind: type[nn.Module]) -> None:
    """Splits ``wide`` and ``narrow`` of the layers of this ``kind`` where the mesh has "tp"."""
    if "tp" in (mesh.mesh_dim_names or ()):
        for layer in module.layers.values():
            if isinstance(layer, kind):
                plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
                parallelize_module(layer, mesh["tp"], plan)


def head(embedding: nn.Embedding, hidden: torch.Tensor) -> torch.Tensor:
    """Scores of words, by the weight that embeds them."""
    return hidden @ embedding.weight.T


def specifications() -> list[Any]:
    """An embedding, blocks, a norm, a function, and the embedding again."""
    blocks = [LayerSpec(Block) for _ in range(BLOCKS)]
    first = TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH)
    last = TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH, forward=head)
    return [first, *blocks, LayerSpec(nn.LayerNorm, WIDTH), torch.tanh, last]


def full_model(seed: int) -> nn.ModuleDict:
    """The model of :func:`specifications` with the values that a pipeline gives it, under the same names."""
    torch.manual_seed(seed)
    return PipelineModule(specifications(), mesh_of_one(), loss=mean_loss).layers


def through(layers: nn.ModuleDict, words: torch.Tensor) -> torch.Tensor:
    """What the layers of :func:`full_model` make of ``words``, without a pipeline."""
    hidden = layers["0"](words)
    for number in range(1, BLOCKS + 2):
        hidden = layers[str(number)](hidden)
    return head(layers["0"], torch.tanh(hidden))


def mesh_of(pp: int, tp: int = 1) -> DeviceMesh:
    """All ranks, ``pp`` stages. Ranks along ``tp`` do the same where nothing is split."""
    return training.mesh_of(pp=pp, tp=tp)


class Trained(NamedTuple):
    """Losses of the steps, norms before clipping, the loss of one evaluation, and this rank's parameters."""

    losses: list[float]
    norms: list[float | None]
    evaluated: float
    parameters: dict[str, torch.Tensor]
    engine: Engine
    pipeline: Pipeline


def train(
    seed: int,
    pp: int,
    config: dict[str, Any],
    *,
    layers: Sequence[Any] | None = None,
    steps: int = 4,
    micro_batches: int = 4,
    tp: int = 1,
    grad_reduction: Any = "per_step",
    checkpoint: bool | None = None,
    **settings: Any,
) -> Trained:
    """Steps on the rank's part of :func:`batches`, of two samples a micro-batch."""
    torch.manual_seed(seed)
    mesh = mesh_of(pp, tp)
    module = PipelineModule(layers or specifications(), mesh, loss=mean_loss, **settings)
    config = {"gradient_clipping": 0.0, **config}
    course = Course(
        module,
        mesh,
        config,
        micro_batches=micro_batches,
        grad_reduction=grad_reduction,
        checkpoint=checkpoint,
    )
    data = batches(seed, steps, 2 * micro_batches * mesh["dp"].size())
    losses, norms = course.steps(data)
    words, wanted = map(course.own, data[-1])
    evaluated = float(course.pipeline.eval_batch(words, targets=wanted))
    parameters = zero_ext.full_state_dict(course.model)
    return Trained(losses, norms, evaluated, parameters, course.engine, course.pipeline)


def course_of(seed: int, mesh: DeviceMesh, stage: int, layers: Sequence[Any] | None = None) -> Course:
    """A pipeline on ``mesh``, its blocks split where it has "tp", with gradients clipped."""
    torch.manual_seed(seed)
    module = PipelineModule(layers or specifications(), mesh, loss=mean_loss)
    split_blocks(module, mesh, Block)
    return Course(module, mesh, {"stage": stage}, micro_batches=4)


class Alone(NamedTuple):
    """The same of one process."""

    losses: list[float]
    norms: list[float | None]
    evaluated: float
    parameters: dict[str, torch.Tensor]


def train_alone(seed: int, samples: int, clip: float = 0.0, steps: int = 4) -> Alone:
    """The steps of :func:`train` on the global batch of ``samples``, without a pipeline or ZeRO."""
    layers, data = full_model(seed), batches(seed, steps, samples)

    def loss(layers: nn.ModuleDict, words: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return mean_loss(through(layers, words), wanted)

    losses, norms = alone(layers, data, loss, clip)
    with torch.no_grad():
        evaluated = float(loss(layers, *data[-1]))
    parameters = {f"layers.{name}": each for name, each in layers.state_dict().items()}
    return Alone(losses, norms, evaluated, parameters)
