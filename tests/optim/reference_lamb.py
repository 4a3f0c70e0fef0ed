"""LAMB in plain torch, straight from algorithm 2 of arXiv 1904.00962: what the tests compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def lamb_update(
    weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, gradient: Tensor, step: int, group: dict[str, Any]
) -> Tensor:
    """The update of ``weight`` before its trust ratio; the moments change in place."""
    beta1, beta2 = group["betas"]
    if group["maximize"]:
        gradient = -gradient
    exp_avg.mul_(beta1).add_(gradient, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
    average, square = exp_avg / correction1, exp_avg_sq / correction2
    eps = group["eps"]
    root = (square + eps).sqrt() if group["eps_inside_sqrt"] else square.sqrt() + eps
    return average / root + group["weight_decay"] * weight


def lamb_ratio(weight: Tensor, update: Tensor, group: dict[str, Any]) -> float:
    """The clamped ratio of the norms, 1 where one is zero."""
    of_weight, of_update = float(weight.double().norm()), float(update.double().norm())
    if of_weight == 0 or of_update == 0:
        return 1.0
    return min(max(of_weight / of_update, group["min_coeff"]), group["max_coeff"])


class ReferenceLamb(torch.optim.Optimizer):
    """LAMB over whole parameters, in their own dtype."""

    def __init__(self, params: Any, **settings: Any) -> None:
        defaults = {
            "lr": 1e-3,
            "bias_correction": True,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "eps_inside_sqrt": False,
            "weight_decay": 0.0,
            "max_coeff": 10.0,
            "min_coeff": 0.01,
            "maximize": False,
        }
        super().__init__(params, {**defaults, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state.update(
                        step=0, exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight)
                    )
                state["step"] += 1
                moments = state["exp_avg"], state["exp_avg_sq"]
                update = lamb_update(weight, *moments, weight.grad, state["step"], group)
                weight.sub_(update, alpha=float(group["lr"]) * lamb_ratio(weight, update, group))
