"""Muon for matrices and AdamW for all other parameters, as one torch optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import adamw as adamw_step
from torch.optim.optimizer import ParamsT

from zero_ext.config.full_tensor_costs import DEFAULT_NS_DTYPE
from zero_ext.optim.full_tensors.muon_groups import (
    ADAMW,
    adamw_settings,
    check_keys,
    check_matrices,
    check_rules,
    check_settings,
    divide,
    ns_dtype,
    read_settings,
    serves,
    tensor_of,
)

BUFFER = "momentum_buffer"
LEAST_PANEL = 256  # rows


class Muon(torch.optim.Optimizer):
    """Muon for hidden matrices, AdamW for the rest.

    A matrix's momentum is orthogonalized by Newton-Schulz iterations, scaled by its shape and subtracted, as
    `torch.optim.Muon` does, bit for bit with the default `ns_dtype`. A parameter of four dimensions, the
    filters of a convolution, is one matrix with a row per filter. Any other of more than two is a stack of
    matrices. Which parameters Muon steps is decided in this order:

    - `use_muon` of a param group;
    - the attribute `use_muon` of a parameter;
    - otherwise those of two dimensions or more, except for what Muon does not suit: matrices of one row or
      column; with `module` the filters of its convolutions in one or three dimensions, the weights of its
      embeddings (`nn.Embedding`, `nn.EmbeddingBag`) and of its output layer over the vocabulary, which is
      what `get_output_embeddings` of Hugging Face's models returns, or the last `nn.Linear` if it has as many
      outputs as an embedding has rows.

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
        ns_dtype: dtype of the iterations, "bf16" or "fp32". The latter is exact to rounding of fp32 and
            doubles the bytes that matrices travel with between ranks. It is the slower one, except on CPUs
            without instructions for bf16.
        adamw: settings of `torch.optim.AdamW` for the other parameters: lr, betas, eps, weight_decay.
        module: the model. Pass it so that AdamW steps its embeddings, its output layer and its
            convolutions in one or three dimensions.
        adamw_names: parts of names of parameters in `module`, in upper or lower case. AdamW steps the
            parameters with such a part in their names, instead of the embeddings and the output layer.

    Raises:
        ValueError: a setting is out of range, or a group that Muon steps has a parameter of one dimension,
            without elements or of complex numbers.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 2))
        >>> optimizer = zero_ext.Muon(model.parameters(), lr=0.02, adamw={"lr": 1e-3}, module=model)
        >>> [(group["use_muon"], len(group["params"])) for group in optimizer.param_groups]
        [(True, 1), (False, 2)]
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
        ns_dtype: str = DEFAULT_NS_DTYPE,
        adamw: Mapping[str, Any] | None = None,
        module: nn.Module | None = None,
        adamw_names: Sequence[str] | None = None,
    ) -> None:
        own = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "adjust_lr_fn": adjust_lr_fn,
            "use_muon": True,
        }
        check_settings(own)
        self._settings = {True: own, False: adamw_settings(adamw)}
        self._rules: list[bool] = []  # whether Muon steps each group, as its state has to stay
        listed: list[Any] = list(params)
        groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
        super().__init__(divide(groups, module, adamw_names), {**ADAMW, **own})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch's optimizers do.

        Args:
            param_group: parameters (`params`), `use_muon`, and the settings that differ from the defaults.

        Raises:
            ValueError: as for the class.
        """
        check_keys(param_group)
        group = {**self._settings[serves(param_group)], **param_group}
        params = group["params"]
        group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
        check_settings(group)
        if group["use_muon"]:
            check_matrices(map(tensor_of, group["params"]))
        super().add_param_group(group)
        self._rules.append(serves(group))

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles of the optimizer are made of."""
        return {**super().__getstate__(), "_settings": self._settings, "_rules": self._rules}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a copied optimizer, or the state and param groups of a loaded state dict.

        Args:
            state: of `__getstate__`, or `state` and `param_groups`, of `torch.optim.Muon` too.

        Raises:
            ValueError: a group of a state dict has another `use_muon` than the one here, or a setting that
                is out of range. Nothing was changed.
        """
        settings, rules = state.get("_settings") or self._settings, state.get("_rules") or self._rules
        for group in state["param_groups"]:
            for key, value in {**settings[serves(group)], "use_muon": serves(group)}.items():
                group.setdefault(key, value)
        check_rules(state["param_groups"], rules)
        super().__setstate__(state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss again, with gradients enabled, before the update.

        Returns:
            What `closure` returned; None without one.

        Raises:
            RuntimeError: a gradient is sparse. Nothing was updated.
            ValueError: `use_muon` of a param group has changed, or a setting is out of range. Nothing was
                updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        settings = read_settings(self.param_groups)
        check_rules(settings, self._rules)
        trained = [
            {each: each.grad for each in group["params"] if each.grad is not None}
            for group in self.param_groups
        ]
        if any(gradient.is_sparse for gradients in trained for gradient in gradients.values()):
            raise RuntimeError(
                "Muon: expected dense gradients, got a sparse one. Pass sparse=False to embeddings."
            )
        for group, gradients in zip(settings, trained, strict=True):
            if group["use_muon"]:
                for parameter, gradient in gradients.items():
                    self._step_matrix(parameter, gradient, group)
            else:
                self._step_adamw(gradients, group)
        return loss

    def _step_matrix(self, parameter: torch.Tensor, gradient: torch.Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        if BUFFER not in state:
            state[BUFFER] = torch.zeros_like(parameter)
        buffer = state[BUFFER].lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        update = newton_schulz(as_matrices(direction), group)
        parameter.add_(update.reshape(parameter.shape), alpha=-adjusted_lr(group, parameter.shape))

    def _step_adamw(self, gradients: Mapping[torch.Tensor, torch.Tensor], group: Mapping[str, Any]) -> None:
        states = [self.state[each] for each in gradients]
        for parameter, state in zip(gradients, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                state["exp_avg"], state["exp_avg_sq"] = (
                    torch.zeros_like(parameter),
                    torch.zeros_like(parameter),
                )
        beta1, beta2 = group["betas"]
        adamw_step.adamw(
            list(gradients),
            list(gradients.values()),
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


def as_matrices(value: torch.Tensor) -> torch.Tensor:
    """Return filters of a convolution [n, channels, h, w] as one matrix, and any other tensor as it is."""
    return value.flatten(1) if value.dim() == 4 else value


def newton_schulz(matrix: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Return an approximation of the orthogonal factor of ``matrix`` [..., m, n] in the group's dtype, as
    ``torch.optim.Muon`` computes it in bfloat16 (Jordan et al., "Muon", 2024).

    Args:
        matrix: of any float dtype. With more than two dimensions it is a stack of matrices.
        group: settings ns_coefficients, ns_steps, ns_dtype and eps.
    """
    # Strides change the last bits of products. Where a matrix is one of several, these are stacked without.
    found = matrix.to(ns_dtype(group)).contiguous()
    stack = found.reshape(-1, *matrix.shape[-2:])
    # A product of a batch rounds otherwise than torch's of a matrix, and on a CPU it is not faster.
    one_by_one = stack.is_cpu or len(stack) == 1
    batches = stack.unbind() if one_by_one else [stack]
    factors = [_orthogonal_factor(each, group) for each in batches]
    return (torch.stack(factors) if one_by_one else factors[0]).reshape(matrix.shape)


def _orthogonal_factor(matrix: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Return that of a matrix [m, n], or of a batch of them [b, m, n] by one product for all."""
    a, b, c = group["ns_coefficients"]
    product, sum_with_product = (torch.mm, torch.addmm) if matrix.dim() == 2 else (torch.bmm, torch.baddbmm)
    tall = matrix.size(-2) > matrix.size(-1)
    found = matrix.mT if tall else matrix
    norms = torch.stack([each.norm() for each in found.unbind()]) if found.dim() == 3 else found.norm()
    found = found / norms.clamp(min=group["eps"])[..., None, None]
    gram = found.new_empty(*found.shape[:-1], found.size(-2))
    polynomial = torch.empty_like(gram)
    for _ in range(group["ns_steps"]):
        for rows in _panels(gram):
            left, right = found[..., rows, :], found[..., : rows.stop, :].mT
            product(left, right, out=gram[..., rows, : rows.stop])
            _mirror(gram, rows)
        for rows in _panels(gram):
            lower, left, right = gram[..., rows, : rows.stop], gram[..., rows, :], gram[..., : rows.stop]
            sum_with_product(lower, left, right, beta=b, alpha=c, out=polynomial[..., rows, : rows.stop])
            _mirror(polynomial, rows)
        found = sum_with_product(found, polynomial, found, beta=a)
    return found.mT if tall else found


def _panels(symmetric: torch.Tensor) -> list[slice]:
    """Return the rows of matrices [..., m, m] that are computed by one product, up to their last column. Four
    panels save three eighths of a symmetric product. Small ones are slower than they save. GPUs are
    unmeasured."""
    size = symmetric.size(-1)
    count = min(4, max(1, size // LEAST_PANEL)) if symmetric.is_cpu else 1
    return [slice(size * index // count, size * (index + 1) // count) for index in range(count)]


def _mirror(symmetric: torch.Tensor, rows: slice) -> None:
    """Copy what was computed of ``rows`` of matrices [..., m, m] to the columns above."""
    symmetric[..., : rows.start, rows] = symmetric[..., rows, : rows.start].mT


def adjusted_lr(group: Mapping[str, Any], shape: Sequence[int]) -> float:
    """Return the learning rate of a matrix, as ``torch.optim.Muon`` adjusts it to its shape."""
    if group["adjust_lr_fn"] == "match_rms_adamw":
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) == 4 else shape[-2:]
        return float(group["lr"]) * 0.2 * math.sqrt(max(rows, columns))
    rows, columns = shape[-2:]  # of filters too, as in Jordan's code and DeepSpeed's
    return float(group["lr"]) * math.sqrt(max(1, rows / columns))
