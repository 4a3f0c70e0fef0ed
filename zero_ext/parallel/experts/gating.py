"""Route tokens to experts, with weights and capacity (GShard, Lepikhin et al., arXiv 2006.16668, section
2.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Routing:
    """The choices of T tokens among E experts, K each, the best first.

    Attributes:
        experts: [K, T] int64, the experts chosen.
        weights: [K, T] float32, what their outputs are multiplied with.
        probabilities: [T, E] float32, the gate's.
        order: [routed] int64, the choices within the capacity of their expert, as numbers `choice * T +
            token`: by expert, for each the first choices before the second ones, in the order of the tokens.
        counts: [E] int64, the choices within capacity of each expert.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    probabilities: torch.Tensor
    order: torch.Tensor
    counts: torch.Tensor

    @property
    def first_choices(self) -> torch.Tensor:
        """Tokens by their first choice, [E] int64, whether its capacity suffices or not."""
        return _count(self.experts[0], self.probabilities.shape[1])


def route(logits: torch.Tensor, top_k: int = 2, capacity_factor: float | None = None) -> Routing:
    """Send each token to the experts with the largest logits, in float32.

    A choice's weight is its probability's share of those of all choices of the token. With one choice it is
    the probability itself, or the gate would learn nothing. The second expert is always asked, not at random
    as in GShard.

    Source: Lepikhin et al., "GShard" (arXiv 2006.16668), section 2.2; Fedus et al., "Switch Transformers"
    (arXiv 2101.03961), section 2.1.

    Args:
        logits: [T, E].
        top_k: experts of a token.
        capacity_factor: None drops nothing. Otherwise an expert takes `ceil(capacity_factor * top_k * T / E)`
            of these tokens and the others go without it; weights stay as they are.

    Returns:
        The choices.
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
    """Return the auxiliary loss that keeps experts equally busy.

    It is E times the sum over the experts of the share of first choices that they have and their mean
    probability. It is GShard's, times E squared, as later work has it. Its gradient goes through the
    probabilities alone, so with the first choices of all ranks, which bring equally many tokens, the mean of
    the ranks' losses is that of all their tokens.

    Args:
        first_choices: [E], tokens by their first choice.
        probabilities: [T, E].

    Returns:
        0-d float32; 1 where all experts are equal.
    """
    share = first_choices.float() / first_choices.sum().clamp(min=1)
    mean = probabilities.sum(0) / max(len(probabilities), 1)
    return len(share) * (share * mean).sum()


def _count(experts: torch.Tensor, number: int) -> torch.Tensor:
    """Return how often each of ``number`` experts occurs."""
    counts = torch.zeros(number, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(0, experts, torch.ones_like(experts))
