"""The slice of a head's vocabulary that a rank computes, where tensor parallelism splits its weight."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class VocabularySlice(NamedTuple):
    """This rank computes the logits of some words: those from ``first`` on, of ``size`` over ``group``.

    No rank has more words than ``largest``.
    """

    first: int
    size: int
    largest: int
    group: dist.ProcessGroup | None

    def check_same(self, labels: Tensor) -> None:
        """Check that all ranks have the same labels [n]. With FSDP2, ranks with tokens of their own hold
        slices of a weight that look like those of a vocabulary."""
        if self.group is None:
            return
        positions = torch.arange(1, len(labels) + 1, device=labels.device)
        digest = torch.stack([(labels * positions).sum(), positions.new_tensor(len(labels))])
        extremes = torch.cat([digest, -digest])
        self.all_reduce(extremes, dist.ReduceOp.MAX)
        torch._assert_async(
            (extremes[:2] == -extremes[2:]).all(),
            "labels: expected the same on all ranks that the weight is split over, got others. Pass the same "
            "tokens, or the full weight.",
        )

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce ``tensor`` over the ranks of the vocabulary, in place."""
        if self.group is not None:
            dist.all_reduce(tensor, op, group=self.group)


def local_tensors(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, VocabularySlice]:
    """Return the plain tensors of this rank, which stay connected to those given, and its words."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(weight, DTensor):
        if isinstance(hidden, DTensor):
            raise ValueError(
                "hidden: expected a plain tensor, as the weight is, got a DTensor. Pass its local tensor."
            )
        words = weight.shape[0] if weight.dim() else 0
        return hidden, weight, bias, VocabularySlice(0, words, words, None)
    mesh, vocabulary = weight.device_mesh, weight.shape[0]
    for name, each in (("weight", weight), ("bias", bias)):
        if each is not None and (not isinstance(each, DTensor) or each.placements != (Shard(0),)):
            placed = each.placements if isinstance(each, DTensor) else type(each).__name__
            raise ValueError(
                f"{name}: expected a DTensor split along its first dimension, got {placed}. Split the head "
                "by 'colwise_split_logits'."
            )
    share = -(-vocabulary // mesh.size())  # as torch's Shard: the last ranks have less
    if share * (mesh.size() - 1) >= vocabulary:
        raise ValueError(
            f"vocabulary: expected words for all {mesh.size()} ranks, got {vocabulary}, which leaves ranks "
            f"without one. Use fewer than {mesh.size()} ranks."
        )
    if isinstance(hidden, DTensor):
        if hidden.placements != (Replicate(),):
            raise ValueError(
                f"hidden: expected all tokens on all ranks of the vocabulary, got {hidden.placements}. "
                "Pass them replicated."
            )
        hidden = hidden.to_local(grad_placements=[Replicate()])
    local_bias = bias.to_local() if isinstance(bias, DTensor) else None
    found = VocabularySlice(share * mesh.get_local_rank(), vocabulary, share, mesh.get_group())
    return hidden, weight.to_local(), local_bias, found
