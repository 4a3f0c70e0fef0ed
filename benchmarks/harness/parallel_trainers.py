"""One transformer in pipelines and split tensors, by zero_ext and by torch alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import zero_ext
from examples.demo_3d.model import BYTES, Block, Positions, apply_tensor_parallel, loss
from zero_ext.parallel.pipeline import LayerSpec, Pipeline, PipelineModule, layer_seed

SEED = 7
RATE = 1e-4


@dataclass(frozen=True)
class Shape:
    """A byte-level transformer, and the batch of a step: `micro_batches` of `samples` windows."""

    width: int
    blocks: int
    heads: int
    window: int
    micro_batches: int
    samples: int

    def layers(self) -> list[LayerSpec]:
        """The model, one layer after another; no weight is shared."""
        return [
            LayerSpec(nn.Embedding, BYTES, self.width),
            LayerSpec(Positions, self.window, self.width),
            *(LayerSpec(Block, self.width, self.heads) for _ in range(self.blocks)),
            LayerSpec(nn.LayerNorm, self.width),
            LayerSpec(nn.Linear, self.width, BYTES, bias=False),
        ]

    def weights(self) -> list[float]:
        """What each layer costs beside a block, for the cut into stages: the ends cost next to nothing."""
        return [0.01, 0.01, *(1.0 for _ in range(self.blocks)), 0.01, 0.02]

    def one_window(self) -> Shape:
        """As many tokens in a single window."""
        tokens = self.micro_batches * self.samples * self.window
        return replace(self, window=tokens, micro_batches=1, samples=1)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Windows [micro_batches · samples, window] and the bytes that follow."""
        drawn = torch.Generator().manual_seed(step)
        size = (self.micro_batches * self.samples, self.window + 1)
        text = torch.randint(BYTES, size, generator=drawn)
        return text[:, :-1], text[:, 1:]


class Trainer(Protocol):
    """What is timed."""

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """A whole optimizer step."""


class ZeroPipeline:
    """zero_ext's pipeline over all ranks of `mesh`."""

    def __init__(self, shape: Shape, mesh: DeviceMesh, stage: int, grad_reduction: Any = "per_step") -> None:
        module = _pipelined(shape, mesh)
        accumulation = shape.micro_batches if grad_reduction == "per_micro_batch" else 1
        config = {"stage": stage, "batch": {"gradient_accumulation_steps": accumulation}}
        optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
        self.model, optimizer = zero_ext.prepare(module, optimizer, config, process_group=mesh)
        self.pipeline = Pipeline(
            self.model, optimizer, micro_batches=shape.micro_batches, grad_reduction=grad_reduction
        )

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """See `Trainer`."""
        self.pipeline.train_batch(inputs, targets=targets)


class TorchPipeline:
    """The same stages under torch's schedule and fused optimizer alone."""

    def __init__(self, shape: Shape, mesh: DeviceMesh) -> None:
        pipeline = mesh["pp"]
        self.rank, self.ranks = pipeline.get_local_rank(), pipeline.size()
        layers = copy.deepcopy(list(_pipelined(shape, mesh).layers.values()))
        module, device = nn.Sequential(*layers), torch.device("cpu")
        stage = PipelineStage(module, self.rank, self.ranks, device, group=pipeline.get_group())
        self.schedule = Schedule1F1B(stage, shape.micro_batches, loss_fn=loss)
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, fused=True)

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """See `Trainer`."""
        self.schedule.step(
            *((inputs,) if self.rank == 0 else ()),
            target=targets if self.rank == self.ranks - 1 else None,
            return_outputs=False,
        )
        self.optimizer.step()
        self.optimizer.zero_grad()


class ZeroTensors:
    """Split tensors and zero_ext's engine around them."""

    def __init__(self, shape: Shape, mesh: DeviceMesh, stage: int) -> None:
        self._prepare(_split(shape, mesh), mesh, stage)

    def _prepare(self, model: nn.Module, mesh: DeviceMesh, stage: int) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        self.model, self.optimizer = zero_ext.prepare(model, optimizer, {"stage": stage}, process_group=mesh)

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """See `Trainer`."""
        loss(self.model(inputs), targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class TorchTensors(ZeroTensors):
    """Split tensors and torch's optimizer alone, whose fused form takes no split tensors beside others."""

    def __init__(self, shape: Shape, mesh: DeviceMesh) -> None:
        self.model = _split(shape, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)


def _pipelined(shape: Shape, mesh: DeviceMesh) -> PipelineModule:
    torch.manual_seed(SEED)
    return PipelineModule(shape.layers(), mesh, loss=loss, split=shape.weights())


def _split(shape: Shape, mesh: DeviceMesh) -> nn.Sequential:
    torch.manual_seed(SEED)
    model = nn.Sequential(*(spec.build(layer_seed(number)) for number, spec in enumerate(shape.layers())))
    apply_tensor_parallel(model, mesh)
    return model
