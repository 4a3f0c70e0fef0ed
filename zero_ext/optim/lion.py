"""Lion as a torch optimizer; torch has none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from zero_ext import ops


class Lion(torch.optim.Optimizer):
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

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"{name}: expected a finite number of at least 0, got {float(value)}. Pass such a number."
                )
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas: expected two numbers in [0, 1), got {betas}. Pass two such numbers.")
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

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
        for number, group in enumerate(self.param_groups):
            hyper = torch.tensor([lion_row(group)], dtype=torch.float64, device="cpu")
            for position, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    _check(parameter, parameter.grad, f"param group {number}, parameter {position}")
                    self._update(parameter, parameter.grad, hyper)
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, hyper: torch.Tensor) -> None:
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
        device, moment = parameter.device, state["exp_avg"]
        # Copies only of what the op cannot read where it lies.
        master = parameter.detach().to(torch.float32).contiguous()
        dtype = moment.dtype if moment.dtype == torch.bfloat16 else torch.float32
        exp_avg = moment.to(dtype).contiguous()
        ops.lion_step_(
            master.view(-1),
            exp_avg.view(-1),
            gradient.contiguous().view(-1),
            None,
            torch.tensor([[0, master.numel()]], device=device),
            hyper.to(device),
            torch.ones((), device=device),
        )
        for lasting, stepped in ((parameter, master), (moment, exp_avg)):
            if lasting.data_ptr() != stepped.data_ptr():
                lasting.copy_(stepped)


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


def _check(parameter: torch.Tensor, gradient: torch.Tensor, name: str) -> None:
    if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"Lion: {name}: expected float32, bfloat16 or float16, since the step is computed in float32, "
            f"got {parameter.dtype}. Convert the model to one of them."
        )
    if gradient.is_sparse:
        raise RuntimeError(
            f"Lion: {name}: expected a dense gradient, got a sparse one. Pass sparse=False to the embedding."
        )
