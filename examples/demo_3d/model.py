"""A byte-level transformer as a list of layers, and its tensor-parallel plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from zero_ext.parallel.pipeline import LayerSpec, TiedLayerSpec

from .settings import ThreeDSettings

BYTES = 256


class Bytes(nn.Embedding):
    """Byte embedding with small initial values, because the same weight also scores the next byte."""

    def __init__(self, width: int) -> None:
        super().__init__(BYTES, width)
        nn.init.normal_(self.weight, std=0.02)


def score(embedding: Bytes, hidden: Tensor) -> Tensor:
    """Return the logits of the next byte [batch, window, 256], using the weight of the embedding."""
    return nn.functional.linear(hidden, embedding.weight)


class Block(nn.Module):
    """Causal attention and a feed-forward layer.

    With tensor parallelism, a rank computes only the heads of its shard of the weights.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [batch, window, width] to the same shape."""
        normal = self.before(hidden)
        query, key, value = (
            each(normal).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.narrow(nn.functional.gelu(self.wide(self.between(hidden))))


SPLIT: dict[str, Any] = {
    "query": ColwiseParallel,
    "key": ColwiseParallel,
    "value": ColwiseParallel,
    "out": RowwiseParallel,
    "wide": ColwiseParallel,
    "narrow": RowwiseParallel,
}


class Positions(nn.Module):
    """Add a learned position embedding."""

    def __init__(self, window: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(window, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [batch, window, width] to the same shape."""
        return hidden + self.weight[: hidden.shape[1]]


def layers(settings: ThreeDSettings) -> list[LayerSpec]:
    """Return the layers of the model. The first and the last layer share their weight across ranks."""
    width = settings.width
    return [
        TiedLayerSpec("bytes", Bytes, width),
        LayerSpec(Positions, settings.window, width),
        *(LayerSpec(Block, width, settings.heads) for _ in range(settings.blocks)),
        LayerSpec(nn.LayerNorm, width),
        TiedLayerSpec("bytes", Bytes, width, forward=score),
    ]


def apply_tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the weights of all blocks over mesh["tp"] if it has more than one rank."""
    for block in module.modules():
        if mesh["tp"].size() > 1 and isinstance(block, Block):
            parallelize_module(block, mesh["tp"], {name: style() for name, style in SPLIT.items()})


def loss(scores: Tensor, following: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())
