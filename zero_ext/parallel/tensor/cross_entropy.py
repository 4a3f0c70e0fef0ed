"""Cross entropy of logits with a vocabulary split over ranks. No rank has all logits of a position."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard


def vocabulary_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int = -100
) -> torch.Tensor:
    """Return the mean cross entropy of logits with a vocabulary split over ranks; a collective of these.

    Computed in float32 at least. Three numbers per position are exchanged instead of its logits.

    Source: Megatron-LM (arXiv 1909.08053), section 3.

    Args:
        logits: DTensor [..., vocabulary], split over the ranks of a mesh along its last dimension, as a head
            split "colwise_split_logits" returns it.
        targets: int64 [...], the same on all ranks.
        ignore_index: marks targets that do not count.

    Returns:
        0-d, a plain tensor, the same on all ranks; NaN where no target counts, as torch's.

    Raises:
        ValueError: logits that are not split so, targets of another shape, or a vocabulary that leaves ranks
            without a word.
        RuntimeError: a target is outside the vocabulary.
    """
    if not isinstance(logits, DTensor) or logits.placements != (Shard(logits.dim() - 1),):
        placed = logits.placements if isinstance(logits, DTensor) else type(logits).__name__
        raise ValueError(
            f"logits: expected a DTensor split along its last dimension, got {placed}. Split the head by "
            "'colwise_split_logits'."
        )
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets: expected shape {tuple(logits.shape[:-1])} for logits {tuple(logits.shape)}, got "
            f"{tuple(targets.shape)}. Reshape them."
        )
    vocabulary, ranks = logits.shape[-1], logits.device_mesh.size()
    share = -(-vocabulary // ranks)  # as torch's Shard: the last ranks have less
    if share * (ranks - 1) >= vocabulary:
        raise ValueError(
            f"vocabulary: expected words for all {ranks} ranks, got {vocabulary}, which leaves ranks without "
            f"one. Use fewer than {ranks} ranks."
        )
    counted = targets != ignore_index
    inside = (targets >= 0) & (targets < vocabulary)
    torch._assert_async(
        (inside | ~counted).all(),
        f"targets: expected 0 to {vocabulary - 1} or ignore_index ({ignore_index}), got some outside of the "
        f"vocabulary of {vocabulary}. Correct the targets.",
    )
    first = share * logits.device_mesh.get_local_rank()
    local: Any = logits.to_local()
    losses: torch.Tensor = _Losses.apply(local, targets - first, logits.device_mesh.get_group())
    return losses.where(counted, 0).sum() / counted.sum()


class _Losses(torch.autograd.Function):
    """Of each position; ``targets`` count from this rank's first word. Backward needs nothing of others."""

    @staticmethod
    def forward(
        context: Any, logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        values = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = values.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        powers = (values - largest[..., None]).exp_()
        local = (targets >= 0) & (targets < values.shape[-1])
        index = targets.where(local, 0)[..., None]
        own = (values.gather(-1, index)[..., 0] - largest).where(local, 0)
        sums = torch.stack([powers.sum(-1), own])
        dist.all_reduce(sums, group=group)
        context.save_for_backward(powers.div_(sums[0][..., None]), index, local)
        context.dtype = logits.dtype
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        probabilities, index, local = context.saved_tensors
        found = probabilities.scatter_add(-1, index, -local[..., None].to(probabilities.dtype))
        return (found * gradients[0][..., None]).to(context.dtype), None, None
