"""A hand-written stack of tensor-parallel blocks, and the gradients of one pass through it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.multi.rank import World
from zero_ext.activation import ActivationCheckpointing, RandomStreams

WIDTH = 64


class Copied(torch.autograd.Function):
    """The input of a tensor-parallel block: its gradients add up over the ranks."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Summed(torch.autograd.Function):
    """The output of a tensor-parallel block: partial sums of the ranks."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = partial.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class InplaceAllReduce(torch.autograd.Function):
    """As :class:`Summed`, in the memory of the partial sums."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = partial.detach()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class TensorParallelBlock(nn.Module):
    """Two products split over the ranks: columns of the first one, rows of the second; ``summed`` adds up."""

    def __init__(
        self, world: World, streams: RandomStreams, summed: type[torch.autograd.Function] = Summed
    ) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH // world.size, bias=False)
        self.down = nn.Linear(4 * WIDTH // world.size, WIDTH, bias=False)
        self.group, self.streams, self.summed = world.group, streams, summed

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        inner = torch.nn.functional.gelu(self.up(Copied.apply(hidden, self.group)))
        with self.streams.fork():  # each rank drops others of its own columns
            inner = torch.nn.functional.dropout(inner, 0.2)
        out = self.summed.apply(self.down(inner), self.group)
        return hidden + torch.nn.functional.dropout(out, 0.2) * mask


def stack(
    world: World, dtype: torch.dtype, summed: type[torch.autograd.Function] = Summed
) -> tuple[nn.ModuleList, RandomStreams]:
    torch.manual_seed(world.seed + 100 * world.rank)
    streams = RandomStreams("cpu")
    return nn.ModuleList(TensorParallelBlock(world, streams, summed) for _ in range(4)).to(dtype), streams


def slopes(
    world: World, blocks: nn.ModuleList, streams: RandomStreams, run: ActivationCheckpointing | None
) -> list[torch.Tensor]:
    streams.seed_model_parallel(world.seed, world.rank)
    features = torch.randn(
        64, WIDTH, dtype=next(blocks.parameters()).dtype, generator=torch.Generator().manual_seed(world.seed)
    )
    hidden, mask = features.requires_grad_(), torch.rand(64, 1) > 0.5
    blocks.zero_grad()
    for block in blocks:
        hidden = block(hidden, mask) if run is None else run(block, hidden, mask)
    hidden.float().square().mean().backward()
    return [features.grad, *(each.grad.clone() for each in blocks.parameters())]
