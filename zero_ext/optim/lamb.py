"""LAMB as a torch optimizer; torch has none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import ParamsT

from zero_ext import ops
from zero_ext.config.internal_error import zero_ext_bug

MOMENTS = ("exp_avg", "exp_avg_sq")


class LambBuffers(NamedTuple):
    """The flat buffers [n] of a step: float32 master weights, moments, gradient."""

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor


class Lamb(torch.optim.Optimizer):
    """LAMB: Adam's update scaled per parameter by layer-wise adaptive moments, for large batches.

    With the moments m and v of Adam, which `bias_correction` divides by 1 - beta^step, a parameter w
    has the update u = m / (sqrt(v) + eps) + weight_decay w, and steps by lr x |w| / |u| against it. The ratio
    of the norms is clamped to [min_coeff, max_coeff], and 1 where either norm is zero: param groups with both
    coefficients 1 are left out of the adaptation.

    Names and defaults are those of DeepSpeed's FusedLamb. That one corrects the bias in lr alone, which
    shrinks the step by weight decay too. Here u is the paper's. State is `exp_avg`, `exp_avg_sq` (float32)
    and `step`. Norms are exact sums, so neither the number of threads nor the sharding of a prepared model
    changes a bit of the result. A gradient that is not finite makes its whole parameter NaN.

    Source: You et al., "Large batch optimization for deep learning: training BERT in 76 minutes" (arXiv
    1904.00962), algorithm 2.

    Args:
        params: parameters or param groups. Parameters are float32, bfloat16 or float16, on the CPU or a CUDA
            device, for which the host waits once per step. Gradients are dense.
        lr: learning rate; may be a tensor.
        bias_correction: divide the moments by 1 - beta^step.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment.
        eps_inside_sqrt: add `eps` to the second moment, before the root.
        weight_decay: added to the update as a multiple of the parameter.
        max_coeff: upper bound of the trust ratio |w| / |u|.
        min_coeff: lower bound of the trust ratio.
        maximize: step along the gradient instead of against it.

    Raises:
        ValueError: a hyper-parameter is out of range.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = zero_ext.Lamb([weight], lr=0.5)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([0.5000, 0.5000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch's optimizers do.

        Args:
            param_group: parameters (`params`) and the hyper-parameters that differ from the defaults.

        Raises:
            ValueError: a hyper-parameter is out of range.
        """
        _check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss again, with gradients enabled, before the update.

        Returns:
            What `closure` returned; None without one.

        Raises:
            RuntimeError: a gradient is sparse.
            TypeError: a parameter is not float32, bfloat16 or float16.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = list(self._with_gradients())
        for parameter, _ in stepped:
            self._count(parameter)
        found = [self._norms(parameter, group).cpu() for parameter, group in stepped]
        for (parameter, group), norms in zip(stepped, found, strict=True):
            self._update(parameter, group, trust_ratio(group, norms))
        return loss

    def _with_gradients(self) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        found = []
        for number, group in enumerate(self.param_groups):
            for position, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    _check(parameter, parameter.grad, f"param group {number}, parameter {position}")
                    found.append((parameter, group))
        return found

    def _count(self, parameter: torch.Tensor) -> None:
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(parameter, dtype=torch.float32)
        state["step"] += 1

    def _norms(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        norms = torch.zeros(1, 2, ops.ACCUMULATOR_ENTRIES, dtype=torch.int64, device=parameter.device)
        ops.lamb_norms_(*self._buffers(parameter), *self._settings(parameter, group, 1.0), norms)
        return norms[0]

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], ratio: float) -> None:
        buffers = self._buffers(parameter)
        ops.lamb_step_(*buffers, None, *self._settings(parameter, group, ratio))
        state = self.state[parameter]
        lasting = (parameter, *(state[moment] for moment in MOMENTS))
        for target, stepped in zip(lasting, buffers, strict=False):
            if target.data_ptr() != stepped.data_ptr():
                target.copy_(stepped.view(target.shape))

    def _buffers(self, parameter: torch.Tensor) -> LambBuffers:
        """Return copies only of what the ops cannot read where it lies."""
        if parameter.grad is None:
            raise zero_ext_bug("a parameter without a gradient does not step")
        state = self.state[parameter]
        moments = [state[moment] for moment in MOMENTS]
        if any(moment.dtype != torch.bfloat16 for moment in moments):
            moments = [moment.to(torch.float32) for moment in moments]
        flat = (parameter.detach().to(torch.float32), *moments, parameter.grad)
        return LambBuffers(*(each.contiguous().view(-1) for each in flat))

    def _settings(
        self, parameter: torch.Tensor, group: dict[str, Any], ratio: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        device, steps = parameter.device, float(self.state[parameter]["step"])
        return (
            torch.tensor([[0, parameter.numel()]], device=device),
            torch.tensor([lamb_row(group, steps, ratio)], dtype=torch.float64, device=device),
            torch.ones((), device=device),
        )


def lamb_row(group: Mapping[str, Any], steps: float, ratio: float) -> list[float]:
    """Return the hyper-parameters of a param group as `ops.lamb_step_` takes them, of the step that is number
    ``steps`` and the trust ratio ``ratio``."""
    beta1, beta2 = (float(beta) for beta in group["betas"])
    corrected = group["bias_correction"]
    return [
        float(group["lr"]),
        beta1,
        beta2,
        float(group["eps"]),
        float(group["weight_decay"]),
        1.0 - beta1**steps if corrected else 1.0,
        1.0 - beta2**steps if corrected else 1.0,
        float(bool(group["eps_inside_sqrt"])),
        float(bool(group["maximize"])),
        ratio,
    ]


def trust_ratio(group: Mapping[str, Any], norms: torch.Tensor) -> float:
    """By what the step of a parameter of ``group`` is multiplied. ``norms`` int64 [2, 33] in host memory is
    its part of what `ops.lamb_norms_` found, summed up. NaN if a norm is not finite."""
    weights, updates = (float(ops.squared_norm_value(each).sqrt()) for each in norms)
    if weights == 0 or updates == 0:
        return 1.0
    ratio = weights / updates
    return ratio if math.isnan(ratio) else min(max(ratio, group["min_coeff"]), group["max_coeff"])


def _check_settings(group: Mapping[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay", "max_coeff", "min_coeff"):
        value = group[name]
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(
                f"{name}: expected a finite number of at least 0, got {float(value)}. Pass such a number."
            )
    if group["min_coeff"] > group["max_coeff"]:
        raise ValueError(
            f"min_coeff: expected at most max_coeff ({group['max_coeff']}), got {group['min_coeff']}. Lower "
            "min_coeff, or raise max_coeff."
        )
    betas = group["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas: expected two numbers in [0, 1), got {betas}. Pass two such numbers.")


def _check(parameter: torch.Tensor, gradient: torch.Tensor, name: str) -> None:
    if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"Lamb: {name}: expected float32, bfloat16 or float16, since the step is computed in float32, "
            f"got {parameter.dtype}. Convert the model to one of them."
        )
    if gradient.is_sparse:
        raise RuntimeError(
            f"Lamb: {name}: expected a dense gradient, got a sparse one. Pass sparse=False to the embedding."
        )
