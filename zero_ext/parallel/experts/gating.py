"""Route tokens to experts, with weights and capacity (GShard, Lepikhin et al., arXiv 2006.16668, section
2.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Routing:
    """The choices of T tokens, K each, the best first.

    ``experts`` [K, T] int64 are the experts chosen, ``weights`` [K, T] float32 what their outputs are
    multiplied with; ``probabilities`` [T, E] float32 are the gate's. ``order`` [routed] int64 are the choices
    within the capacity of their expert, as numbers ``choice * T + token``: by expert, for each the first
    choices before the second ones, in the order of the tokens. ``counts`` [E] int64 are those of each expert.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    probabilities: torch.Tensor
    order: torch.Tensor
    counts: torch.Tensor

    @property
    def first_choices(self) -> torch.Tensor:
        """How many tokens like each expert best [E] int64, whether its capacity suffices or not."""
        return _count(self.experts[0], self.probabilities.shape[1])


def route(logits: torch.Tensor, top_k: int = 2, capacity_factor: float | None = None) -> Routing:
    """Sends each token to the ``top_k`` experts with the largest ``logits`` [T, E], in float32.

    A choice's weight is its probability's share of those of all choices of the token; with one choice it is
    the probability itself, or the gate would learn nothing (Switch Transformers, Fedus et al., arXiv
    2101.03961, section 2.1). The second expert is always asked, not at random as in GShard.
    ``capacity_factor`` None drops nothing. Otherwise an expert takes
    ``ceil(capacity_factor * top_k * T / E)`` of these tokens and the others go without it; weights stay as
    they are.
    """
    tokens, experts = logits.shape
    probabilities = torch.softmax(logits.float(), dim=-1)
    best, chosen = probabilities.topk(top_k, dim=-1)
    weights = best / best.sum(-1, keepdim=True) if top_k > 1 else best
    flat = chosen.t().reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = _count(flat, experts)
    if capacity_factor is not None:
        capacity = math.ceil(capacity_factor * top_k * tokens / experts)
        sorted_experts = flat[order]
        positions = (
            torch.arange(flat.numel(), device=flat.device) - (counts.cumsum(0) - counts)[sorted_experts]
        )
        order, counts = order[positions < capacity], counts.clamp(max=capacity)
    return Routing(chosen.t(), weights.t(), probabilities, order, counts)


def balance_loss(first_choices: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """The auxiliary loss that keeps experts equally busy, 0-d float32: E times the sum over the experts of
    the share of ``first_choices`` [E] that they have and their mean of ``probabilities`` [T, E]; 1 where all
    are equal.

    It is GShard's, times E squared, as later work has it. Its gradient goes through the probabilities alone,
    so with the first choices of all ranks, which bring equally many tokens, the mean of the ranks' losses is
    that of all their tokens.
    """
    share = first_choices.float() / first_choices.sum().clamp(min=1)
    mean = probabilities.sum(0) / max(len(probabilities), 1)
    return len(share) * (share * mean).sum()


def _count(experts: torch.Tensor, number: int) -> torch.Tensor:
    """How often each of ``number`` experts occurs."""
    counts = torch.zeros(number, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(0, experts, torch.ones_like(experts))
