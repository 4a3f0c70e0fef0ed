"""A small model as a list of layers, its steps in a pipeline, and the same steps in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zero_ext
from zero_ext.parallel import make_mesh
from zero_ext.parallel.pipeline import LayerSpec, Pipeline, PipelineModule, TiedLayerSpec
from zero_ext.zero import Engine, engine_of

WIDTH, WORDS, LENGTH, BLOCKS = 8, 16, 5, 6
RATE = 1e-2


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
    mesh = DeviceMesh("cpu", torch.tensor([[torch.distributed.get_rank()]]), mesh_dim_names=("pp", "dp"))
    return PipelineModule(specifications(), mesh, loss=mean_loss).layers


def through(layers: nn.ModuleDict, words: torch.Tensor) -> torch.Tensor:
    """What the layers of :func:`full_model` make of ``words``, without a pipeline."""
    hidden = layers["0"](words)
    for number in range(1, BLOCKS + 2):
        hidden = layers[str(number)](hidden)
    return head(layers["0"], torch.tanh(hidden))


def mean_loss(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Cross entropy, a mean over all words."""
    return nn.functional.cross_entropy(scores.flatten(0, 1).float(), words.flatten())


def batches(seed: int, steps: int, samples: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Words [samples, LENGTH] and what they should predict, for each step."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        words = torch.randint(WORDS, (2, samples, LENGTH), generator=generator)
        yield words[0], words[1]


@functools.cache
def mesh_of(pp: int, tp: int = 1) -> DeviceMesh:
    """All ranks, ``pp`` stages; made once in a process. Ranks along ``tp`` do the same where nothing is
    split."""
    return make_mesh(pp=pp, tp=tp, device_type="cpu")


class Trained(NamedTuple):
    """Losses of the steps, norms before clipping, the loss of one evaluation, and this rank's parameters."""

    losses: list[float]
    norms: list[float | None]
    evaluated: float
    parameters: dict[str, torch.Tensor]
    engine: Engine
    pipeline: Pipeline


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """With an epsilon that does not make rounding large where gradients are nothing."""
    return torch.optim.AdamW(parameters, lr=RATE, eps=1e-3)


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
    make: Callable[[Any], torch.optim.Optimizer] = adamw,
    **settings: Any,
) -> Trained:
    """Steps on the rank's part of :func:`batches`, of two samples a micro-batch."""
    torch.manual_seed(seed)
    mesh = mesh_of(pp, tp)
    module = PipelineModule(layers or specifications(), mesh, loss=mean_loss, **settings)
    model, optimizer = zero_ext.prepare(module, make(module.parameters()), config, process_group=mesh)
    pipeline = Pipeline(
        model, optimizer, micro_batches=micro_batches, grad_reduction=grad_reduction, checkpoint=checkpoint
    )
    engine, data = engine_of(model), mesh["dp"]
    samples, own = 2 * micro_batches, data.get_local_rank()
    losses, norms = [], []
    for words, wanted in batches(seed, steps, samples * data.size()):
        own_samples = slice(samples * own, samples * (own + 1))
        losses.append(float(pipeline.train_batch(words[own_samples], targets=wanted[own_samples])))
        norms.append(engine.grad_norm)
    evaluated = float(pipeline.eval_batch(words[own_samples], targets=wanted[own_samples]))
    return Trained(losses, norms, evaluated, zero_ext.full_state_dict(model), engine, pipeline)


class Alone(NamedTuple):
    """The same of one process."""

    losses: list[float]
    norms: list[float]
    evaluated: float
    parameters: dict[str, torch.Tensor]


def train_alone(seed: int, samples: int, clip: float = 0.0, steps: int = 4) -> Alone:
    """The steps of :func:`train` on the global batch of ``samples``, without a pipeline or ZeRO."""
    layers = full_model(seed)
    optimizer = adamw(layers.parameters())
    losses, norms = [], []
    for words, wanted in batches(seed, steps, samples):
        loss = mean_loss(through(layers, words), wanted)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(layers.parameters(), clip or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        evaluated = float(mean_loss(through(layers, words), wanted))
    parameters = {f"layers.{name}": each for name, each in layers.state_dict().items()}
    return Alone(losses, norms, evaluated, parameters)
