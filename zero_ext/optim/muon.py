"""Muon for matrices and AdamW for all other parameters, as one torch optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import adamw
from torch.optim.optimizer import ParamsT

BUFFER = "momentum_buffer"
_ADAMW: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "maximize": False,
    "decoupled_weight_decay": True,
}


def serves(group: Mapping[str, Any]) -> bool:
    """Return whether Muon steps the parameters of a param group; those of ``torch.optim.Muon`` all."""
    return bool(group.get("use_muon", True))


class Muon(torch.optim.Optimizer):
    """Muon for hidden matrices, AdamW for the rest.

    A matrix's momentum is orthogonalized by Newton-Schulz iterations in bfloat16, scaled by its shape and
    subtracted, as `torch.optim.Muon` does, bit for bit. A parameter of more than two dimensions is a stack of
    matrices. Which parameters Muon steps is decided in this order:

    - `use_muon` of a param group;
    - the attribute `use_muon` of a parameter, as for DeepSpeed;
    - otherwise those of two dimensions or more. Set the attribute to False for embeddings and output layers,
      which Muon does not suit.

    State is `momentum_buffer`, or AdamW's `exp_avg`, `exp_avg_sq` and `step`.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); Liu et al., "Muon
    is scalable for LLM training" (arXiv 2502.16982) for "match_rms_adamw".

    Args:
        params: parameters, or param groups with settings of their own.
        lr: learning rate of Muon.
        weight_decay: decoupled weight decay of Muon.
        momentum: decay of the momentum.
        nesterov: orthogonalize the next step's momentum.
        ns_coefficients: of the polynomial that is iterated.
        eps: least norm that a matrix is divided by.
        ns_steps: iterations, fewer than 100.
        adjust_lr_fn: "original" (also None) multiplies `lr` by max(1, rows / columns)^½, "match_rms_adamw"
            by 0.2 max(rows, columns)^½.
        adamw: settings of `torch.optim.AdamW` for the other parameters: lr, betas, eps, weight_decay.

    Raises:
        ValueError: a setting is out of range, or a group that Muon steps has a parameter of one dimension.

    Examples:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = zero_ext.Muon(model.parameters(), lr=0.02, adamw={"lr": 1e-3})
        >>> [(group["use_muon"], len(group["params"])) for group in optimizer.param_groups]
        [(True, 1), (False, 1)]
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw: Mapping[str, Any] | None = None,
    ) -> None:
        own = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "use_muon": True,
        }
        unknown = set(adamw or {}) - {"lr", "betas", "eps", "weight_decay"}
        if unknown:
            raise ValueError(
                f"adamw: expected lr, betas, eps and weight_decay, got {sorted(unknown)}. Remove them."
            )
        self._settings = {True: own, False: {**_ADAMW, **(adamw or {}), "use_muon": False}}
        listed: list[Any] = list(params)
        groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
        super().__init__([each for group in groups for each in _by_rule(group)], {**_ADAMW, **own})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch's optimizers do.

        Args:
            param_group: parameters (`params`), `use_muon`, and the settings that differ from the defaults.

        Raises:
            ValueError: as for the class.
        """
        group = {**self._settings[serves(param_group)], **param_group}
        params = group["params"]
        group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
        if group["use_muon"]:
            _check(group)
        super().add_param_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss again, with gradients enabled, before the update.

        Returns:
            What `closure` returned; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [each for each in group["params"] if each.grad is not None]
            if group["use_muon"]:
                for parameter in trained:
                    self._step_matrix(parameter, group)
            else:
                self._step_adamw(trained, group)
        return loss

    def _step_matrix(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> None:
        state, gradient = self.state[parameter], self._gradient(parameter)
        if BUFFER not in state:
            state[BUFFER] = torch.zeros_like(parameter)
        buffer = state[BUFFER].lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        update = newton_schulz(direction.bfloat16(), group)
        parameter.add_(update, alpha=-adjusted_lr(group, parameter.shape))

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter.grad is None or parameter.grad.is_sparse:
            raise RuntimeError(
                "Muon: expected a dense gradient, got another. Pass sparse=False to embeddings."
            )
        return parameter.grad

    def _step_adamw(self, parameters: Sequence[torch.Tensor], group: Mapping[str, Any]) -> None:
        states = [self.state[each] for each in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                state["exp_avg"], state["exp_avg_sq"] = (
                    torch.zeros_like(parameter),
                    torch.zeros_like(parameter),
                )
        beta1, beta2 = group["betas"]
        adamw.adamw(
            list(parameters),
            [self._gradient(each) for each in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _by_rule(group: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Yield the param group divided into what Muon steps and what AdamW steps."""
    if "use_muon" in group:
        yield dict(group)
        return
    params = group["params"]
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    for use_muon in (True, False):
        chosen = [each for each in params if getattr(each, "use_muon", each.dim() >= 2) == use_muon]
        if chosen:
            yield {**group, "params": chosen, "use_muon": use_muon}


def _check(group: Mapping[str, Any]) -> None:
    for name in ("lr", "weight_decay", "momentum", "eps"):
        if not (math.isfinite(group[name]) and group[name] >= 0):
            raise ValueError(
                f"{name}: expected a finite number of at least 0, got {float(group[name])}. Pass such a "
                "number."
            )
    coefficients = group["ns_coefficients"]
    if len(coefficients) != 3 or not all(map(math.isfinite, coefficients)):
        raise ValueError(
            f"ns_coefficients: expected three finite numbers, got {tuple(coefficients)}. Pass such numbers."
        )
    if not 0 <= group["ns_steps"] < 100:
        raise ValueError(f"ns_steps: expected 0 to 99, got {group['ns_steps']}. Pass such a number.")
    if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        raise ValueError(
            f"adjust_lr_fn: expected 'original' or 'match_rms_adamw', got {group['adjust_lr_fn']!r}. Pass "
            "one of them."
        )
    for parameter in group["params"]:
        if parameter.dim() < 2:
            raise ValueError(
                f"use_muon: expected matrices, got a parameter of shape {tuple(parameter.shape)}. Set "
                "use_muon to False in its param group, for which AdamW steps it."
            )


def newton_schulz(matrix: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Return an approximation of the orthogonal factor of ``matrix`` [..., m, n] in bfloat16, as
    ``torch.optim.Muon`` computes it (Jordan et al., "Muon", 2024).

    Args:
        matrix: bfloat16; with more than two dimensions a stack of matrices.
        group: settings ns_coefficients, ns_steps and eps.
    """
    a, b, c = group["ns_coefficients"]
    found = matrix.reshape(-1, *matrix.shape[-2:])
    tall = found.size(1) > found.size(2)
    found = found.mT if tall else found
    norms = torch.stack([each.norm() for each in found])
    found = found / norms.clamp(min=group["eps"])[:, None, None]
    for _ in range(group["ns_steps"]):
        gram = found @ found.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.baddbmm(found, polynomial, found, beta=a)
    return (found.mT if tall else found).reshape(matrix.shape)


def newton_schulz_cost(shape: Sequence[int]) -> int:
    """Return what orthogonalizing a matrix costs, in multiplications of a step: m²n for m rows and n columns,
    m the smaller."""
    rows, columns = sorted(shape[-2:])
    return rows * rows * columns * math.prod(shape[:-2])


def adjusted_lr(group: Mapping[str, Any], shape: Sequence[int]) -> float:
    """Return the learning rate of a matrix, as ``torch.optim.Muon`` adjusts it to its shape."""
    rows, columns = shape[-2:]
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return float(group["lr"]) * 0.2 * math.sqrt(max(rows, columns))
    return float(group["lr"]) * math.sqrt(max(1, rows / columns))
