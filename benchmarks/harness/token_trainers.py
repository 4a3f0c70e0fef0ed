"""One transformer with its sequences, or its experts, over ranks: by zero_ext and by torch alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.parallel_trainers import RATE, SEED, Shape, ZeroTensors
from examples.demo_3d.model import BYTES, Block, Positions
from zero_ext.parallel import sequence_attention
from zero_ext.parallel.experts import MixtureOfExperts

EXPERTS, CHOICES = 4, 2
Attend = Callable[..., Tensor]
Mixture = Callable[[int, Sequence[nn.Module]], nn.Module]


class ShardPositions(Positions):
    """The embeddings of a shard of the positions, which begins at `first`."""

    def __init__(self, window: int, width: int, first: int) -> None:
        super().__init__(window, width)
        self.first = first

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [batch, shard, width] to the same shape."""
        return hidden + self.weight[self.first : self.first + hidden.shape[1]]


class TokenBlock(Block):
    """The block with attention by `attend`, and with experts for its network where there is a `mixture`."""

    def __init__(self, width: int, heads: int, attend: Attend, mixture: Mixture | None) -> None:
        super().__init__(width, heads)
        self.attend = attend
        self.network: nn.Module = nn.Sequential(self.wide, nn.GELU(), self.narrow)
        del self.wide, self.narrow
        if mixture is not None:
            self.network = mixture(width, [expert(width) for _ in range(EXPERTS)])

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [batch, window, width] to the same shape."""
        normal = self.before(hidden)
        heads = (
            each(normal).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        mixed = self.attend(*heads, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.network(self.between(hidden))


def expert(width: int) -> nn.Module:
    """As many operations, of two for each token, as the network of a block."""
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class ZeroMixture(MixtureOfExperts):
    """zero_ext's mixture without its auxiliary loss."""

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        """Map hidden states [batch, window, width] to the same shape."""
        return super().forward(hidden).hidden


class TorchMixture(nn.Module):
    """The same choices by torch's all-to-all with autograd, as torchtitan exchanges tokens."""

    def __init__(self, width: int, experts: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.ranks = group, group.size()
        self.own = len(experts) // self.ranks
        self.gate = nn.Linear(width, len(experts), bias=False)
        first = group.rank() * self.own
        self.experts = nn.ModuleDict({str(first + each): experts[first + each] for each in range(self.own)})

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [batch, window, width] to the same shape."""
        tokens = hidden.flatten(0, 1)
        weights, chosen = torch.softmax(self.gate(tokens), dim=-1).topk(CHOICES, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.ranks * self.own)
        received = all_to_all_single(counts, None, None, self.group).view(self.ranks, self.own)
        sends, receives = counts.view(self.ranks, self.own).sum(1).tolist(), received.sum(1).tolist()
        rows = all_to_all_single_autograd(tokens[order // CHOICES], receives, sends, self.group)
        sizes = received.flatten().tolist()
        arrived = rows.split(sizes)  # by rank, and those of each by expert
        outputs = [
            each(torch.cat(arrived[number :: self.own])).split(sizes[number :: self.own])
            for number, each in enumerate(self.experts.values())
        ]
        back = torch.cat(list(itertools.chain.from_iterable(zip(*outputs, strict=True))))
        rows = all_to_all_single_autograd(back, sends, receives, self.group)
        weighted = rows * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, order // CHOICES, weighted).view_as(hidden)


def torch_sequence_attention(group: dist.ProcessGroup) -> Attend:
    """Attention over sequences that are sharded over `group`: heads are exchanged by torch's all-to-all with
    autograd, query, key and value in one call."""
    ranks = group.size()

    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        shards = torch.stack((query, key, value)).unflatten(2, (ranks, -1)).movedim(2, 0)
        full = all_to_all_single_autograd(shards.contiguous(), None, None, group)
        full = full.movedim(0, 3).flatten(3, 4)  # [3, batch, heads / ranks, length, head dim]
        attended = scaled_dot_product_attention(*full, **options)
        shares = attended.unflatten(2, (ranks, -1)).movedim(2, 0)
        return all_to_all_single_autograd(shares.contiguous(), None, None, group).movedim(0, 1).flatten(1, 2)

    return attend


class ZeroTokens(ZeroTensors):
    """zero_ext's engine around a model that is on a rank's tokens, along "cp" or "ep" of `mesh`."""

    def __init__(self, shape: Shape, mesh: DeviceMesh, axis: str, stage: int) -> None:
        self.own = _own_tokens(shape, axis, mesh[axis])
        if axis == "cp":
            attend = sequence_attention(scaled_dot_product_attention, mesh)
            model = _model(shape, self.own, attend=attend)
        else:
            model = _model(shape, self.own, mixture=partial(ZeroMixture, mesh=mesh, top_k=CHOICES))
        self._prepare(model, mesh, stage)

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """See `Trainer`."""
        super().step(inputs[self.own], targets[self.own])


class TorchTokens(ZeroTokens):
    """The same by torch's all-to-all, DDP and fused optimizer alone. A rank's experts have no replicas."""

    def __init__(self, shape: Shape, mesh: DeviceMesh, axis: str) -> None:
        self.own, group = _own_tokens(shape, axis, mesh[axis]), mesh[axis].get_group()
        if axis == "cp":
            model = _model(shape, self.own, attend=torch_sequence_attention(group))
        else:
            model = _model(shape, self.own, mixture=partial(TorchMixture, group=group))
        experts = {name: value for name, value in model.named_parameters() if ".experts." in name}
        for parameter in experts.values():
            # Tokens of all ranks are in it, each with the gradient of its rank's mean.
            parameter.register_post_accumulate_grad_hook(_divided_by(group.size()))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(experts))
        self.model = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)


def _divided_by(ranks: int) -> Callable[[Tensor], None]:
    def divide(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.div_(ranks)

    return divide


def _own_tokens(shape: Shape, axis: str, ranks: DeviceMesh) -> tuple[slice, slice]:
    """This rank's part of a batch [samples, window]: of each window along "cp", of the samples along "ep"."""
    rank, size = ranks.get_local_rank(), ranks.size()
    if axis == "cp":
        length = shape.window // size
        return slice(None), slice(rank * length, (rank + 1) * length)
    samples = shape.micro_batches * shape.samples // size
    return slice(rank * samples, (rank + 1) * samples), slice(None)


def _model(
    shape: Shape,
    own: tuple[slice, slice],
    *,
    attend: Attend = scaled_dot_product_attention,
    mixture: Mixture | None = None,
) -> nn.Sequential:
    """The layers of `shape` on a rank's `own` tokens."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Embedding(BYTES, shape.width),
        ShardPositions(shape.window, shape.width, own[1].start or 0),
        *(TokenBlock(shape.width, shape.heads, attend, mixture) for _ in range(shape.blocks)),
        nn.LayerNorm(shape.width),
        nn.Linear(shape.width, BYTES, bias=False),
    )
