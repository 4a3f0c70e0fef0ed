"""A Llama as layers of a pipeline, its tensors split by torch's styles: sizes and a cheap forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from zero_ext.parallel.pipeline import LayerSpec, PipelineModule
from zero_ext.plan.simulation import Transformer


class Block(nn.Module):
    """The parameters of a layer; attention without its softmax."""

    def __init__(self, hidden: int, feed_forward: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nn.Linear(hidden, hidden, bias=False))
        self.gate, self.up = (nn.Linear(hidden, feed_forward, bias=False) for _ in range(2))
        self.down = nn.Linear(feed_forward, hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        seen = self.first_norm(hidden)
        hidden = hidden + self.out(self.query(seen) * self.key(seen).tanh() + self.value(seen))
        seen = self.second_norm(hidden)
        return hidden + self.down(nn.functional.silu(self.gate(seen)) * self.up(seen))


PLAN = {
    **dict.fromkeys(("query", "key", "value", "gate", "up"), ColwiseParallel),
    **dict.fromkeys(("out", "down"), RowwiseParallel),
}


def mean_loss(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Cross entropy over all words."""
    return nn.functional.cross_entropy(scores.flatten(0, 1).float(), words.flatten())


def llama(shape: Transformer, mesh: DeviceMesh) -> PipelineModule:
    """This rank's part of ``shape`` in bf16, on torch's current device."""
    blocks = [LayerSpec(Block, shape.hidden, shape.feed_forward) for _ in range(shape.layers)]
    layers: list[Any] = [
        LayerSpec(nn.Embedding, shape.vocabulary, shape.hidden),
        *blocks,
        LayerSpec(nn.RMSNorm, shape.hidden),
        LayerSpec(nn.Linear, shape.hidden, shape.vocabulary, bias=False),
    ]
    module = PipelineModule(layers, mesh, loss=mean_loss).bfloat16()
    if mesh["tp"].size() > 1:
        for layer in module.layers.values():
            if isinstance(layer, Block):
                parallelize_module(layer, mesh["tp"], {name: style() for name, style in PLAN.items()})
            elif isinstance(layer, nn.Embedding):
                parallelize_module(layer, mesh["tp"], RowwiseParallel(input_layouts=Replicate()))
            elif isinstance(layer, nn.Linear):
                parallelize_module(layer, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    return module
