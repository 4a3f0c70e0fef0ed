"""LAMB and Lion as torch optimizers, which step unsharded parameters too; torch has neither."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from zero_ext import ops
from zero_ext.config.internal_error import zero_ext_bug


def check_settings(settings: Mapping[str, Any], numbers: Sequence[str]) -> None:
    """Raise ``ValueError`` unless ``betas`` are two numbers in [0, 1) and those named in ``numbers`` finite
    and not negative."""
    for name in numbers:
        value = settings[name]
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(
                f"{name}: expected a finite number of at least 0, got {float(value)}. Pass such a number."
            )
    betas = settings["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas: expected two numbers in [0, 1), got {betas}. Pass two such numbers.")


class FusedOptimizer(torch.optim.Optimizer, ABC):
    """Base of optimizers with an op for one parameter. Subclasses name their state in ``MOMENTS``, and in
    ``NUMBERS`` the hyper-parameters that are not negative."""

    MOMENTS: tuple[str, ...]
    NUMBERS: tuple[str, ...]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch's optimizers do.

        Args:
            param_group: parameters (`params`) and the hyper-parameters that differ from the defaults.

        Raises:
            ValueError: a hyper-parameter is out of range.
        """
        self._check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        check_settings(settings, self.NUMBERS)

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
        self._update(self._with_gradients())
        return loss

    @abstractmethod
    def _update(self, stepped: Sequence[tuple[torch.Tensor, dict[str, Any]]]) -> None:
        """Step the parameters, each with its param group; their gradients fit."""

    def _with_gradients(self) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        found = []
        for number, group in enumerate(self.param_groups):
            for position, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self._check(parameter, parameter.grad, f"param group {number}, parameter {position}")
                    found.append((parameter, group))
        return found

    def _check(self, parameter: torch.Tensor, gradient: torch.Tensor, name: str) -> None:
        name = f"{type(self).__name__}: {name}"
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(
                f"{name}: expected float32, bfloat16 or float16, since the step is computed in float32, "
                f"got {parameter.dtype}. Convert the model to one of them."
            )
        if gradient.is_sparse:
            raise RuntimeError(
                f"{name}: expected a dense gradient, got a sparse one. Pass sparse=False to the embedding."
            )

    def _buffers(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """Return master weights, moments and gradient [n], copies only of what the op cannot read where it
        lies."""
        if parameter.grad is None:
            raise zero_ext_bug("a parameter without a gradient does not step")
        state = self.state[parameter]
        for name in self.MOMENTS:
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=torch.float32)
        moments = [state[name] for name in self.MOMENTS]
        if any(moment.dtype != torch.bfloat16 for moment in moments):
            moments = [moment.to(torch.float32) for moment in moments]
        flat = (parameter.detach().to(torch.float32), *moments, parameter.grad)
        return [each.contiguous().view(-1) for each in flat]

    def _apply(self, op: Callable[..., None], parameter: torch.Tensor, row: Sequence[float]) -> None:
        """Step one parameter by ``op`` with hyper-parameters ``row``."""
        buffers = self._buffers(parameter)
        op(*buffers, None, *_settings(parameter, row))
        state = self.state[parameter]
        lasting = (parameter, *(state[name] for name in self.MOMENTS))
        for target, stepped in zip(lasting, buffers, strict=False):
            if target.data_ptr() != stepped.data_ptr():
                target.copy_(stepped.view(target.shape))


def _settings(
    parameter: torch.Tensor, row: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return segments, hyper-parameters and scale of a step on one parameter, as its op takes them."""
    device = parameter.device
    return (
        torch.tensor([[0, parameter.numel()]], device=device),
        torch.tensor([row], dtype=torch.float64, device=device),
        torch.ones((), device=device),
    )


class Lamb(FusedOptimizer):
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

    MOMENTS = ("exp_avg", "exp_avg_sq")
    NUMBERS = ("lr", "eps", "weight_decay", "max_coeff", "min_coeff")

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

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        super()._check_settings(settings)
        low, high = settings["min_coeff"], settings["max_coeff"]
        if low > high:
            raise ValueError(
                f"min_coeff: expected at most max_coeff ({high}), got {low}. Lower min_coeff, or raise "
                "max_coeff."
            )

    def _update(self, stepped: Sequence[tuple[torch.Tensor, dict[str, Any]]]) -> None:
        for parameter, _ in stepped:
            state = self.state[parameter]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["step"] += 1
        found = [
            self._norms(parameter, self._row(parameter, group, 1.0)).cpu() for parameter, group in stepped
        ]
        for (parameter, group), norms in zip(stepped, found, strict=True):
            row = self._row(parameter, group, trust_ratio(group, norms))
            self._apply(ops.lamb_step_, parameter, row)

    def _row(self, parameter: torch.Tensor, group: Mapping[str, Any], ratio: float) -> list[float]:
        return lamb_row(group, float(self.state[parameter]["step"]), ratio)

    def _norms(self, parameter: torch.Tensor, row: Sequence[float]) -> torch.Tensor:
        norms = torch.zeros(1, 2, ops.ACCUMULATOR_ENTRIES, dtype=torch.int64, device=parameter.device)
        master, exp_avg, exp_avg_sq, grad = self._buffers(parameter)
        ops.lamb_norms_(master, exp_avg, exp_avg_sq, grad, *_settings(parameter, row), norms)
        return norms[0]


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


class Lion(FusedOptimizer):
    """Lion: evolved sign momentum, where every weight steps by `lr` up or down.

    With gradient g, moment m and weight w: w shrinks by lr x weight_decay of itself, then steps by lr against
    the sign of beta1 m + (1 - beta1) g. Then m becomes beta2 m + (1 - beta2) g. One fused pass in float32;
    state is m (`exp_avg`, float32). The authors advise an lr 3 to 10 times smaller and a weight decay as many
    times larger than for AdamW.

    Source: Chen et al., "Symbolic discovery of optimization algorithms" (arXiv 2302.06675), algorithm 2.

    Args:
        params: parameters or param groups. Parameters are float32, bfloat16 or float16, on the CPU or a CUDA
            device. Gradients are dense.
        lr: learning rate; may be a tensor.
        betas: weights of the moment in the step and in its own update, each in [0, 1).
        weight_decay: decoupled weight decay.
        maximize: step along the gradient instead of against it.

    Raises:
        ValueError: a hyper-parameter is out of range.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = zero_ext.Lion([weight], lr=0.25)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([0.7500, 0.7500])
    """

    MOMENTS = ("exp_avg",)
    NUMBERS = ("lr", "weight_decay")

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        )

    def _update(self, stepped: Sequence[tuple[torch.Tensor, dict[str, Any]]]) -> None:
        for parameter, group in stepped:
            self._apply(ops.lion_step_, parameter, lion_row(group))


def lion_row(group: dict[str, Any]) -> list[float]:
    """Return the hyper-parameters of a param group as `ops.lion_step_` takes them."""
    beta1, beta2 = group["betas"]
    return [
        float(group["lr"]),
        float(beta1),
        float(beta2),
        float(group["weight_decay"]),
        float(bool(group["maximize"])),
    ]
