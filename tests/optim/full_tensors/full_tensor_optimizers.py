"""Small optimizers that need full tensors, as users write them: Shampoo, one like SOAP, and bad ones."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT


class Shampoo(torch.optim.Optimizer):
    """One factor per dimension, of any number of dimensions, in a list, and momentum (Gupta et al., 2018)."""

    def __init__(self, params: ParamsT, lr: float = 0.1, momentum: float = 0.5, every: int = 2) -> None:
        self.every = every
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)

    def _step_one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["steps"] = 0
            state["factors"] = [torch.eye(size, device=gradient.device) * 1e-2 for size in gradient.shape]
            state["roots"] = {
                "inverse": tuple(torch.eye(size, device=gradient.device) for size in gradient.shape),
                "count": None,
            }
            state["momentum"] = gradient.clone()
        state["steps"] += 1
        update = gradient
        for axis, factor in enumerate(state["factors"]):
            rows = gradient.movedim(axis, 0).reshape(gradient.shape[axis], -1)
            factor.addmm_(rows, rows.T)
            if state["steps"] % self.every == 1:
                values, vectors = torch.linalg.eigh(factor)
                root = vectors * values.clamp(min=1e-6).pow(-0.5 / gradient.dim()) @ vectors.T
                state["roots"]["inverse"][axis].copy_(root)
            update = torch.tensordot(state["roots"]["inverse"][axis], update.movedim(axis, 0), 1).movedim(
                0, axis
            )
        state["momentum"].lerp_(update, 1 - group["momentum"])
        parameter.sub_(state["momentum"], alpha=group["lr"])


class Rotated(torch.optim.Optimizer):
    """Adam in a basis that is replaced by one of other strides, as in SOAP. Its group counts the steps, its
    state has 0-d tensors, Python numbers and an empty list, and vectors have no basis.
    """

    def __init__(self, params: ParamsT, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)

    def _step_one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        matrix = gradient.reshape(gradient.shape[0], -1) if gradient.dim() else gradient.reshape(1, 1)
        if not state:
            state["basis"] = [torch.linalg.svd(matrix)[0]] if gradient.dim() > 1 else []
            state["moments"] = {"first": torch.zeros_like(matrix), "second": torch.zeros_like(matrix)}
            state["seen"] = torch.zeros((), dtype=torch.int64)
            state["scale"], state["warm"] = 1.0, True
        state["seen"] += 1
        state["scale"] *= 0.99
        basis = state["basis"][0] if state["basis"] else torch.eye(matrix.shape[0], device=matrix.device)
        rotated = basis.T @ matrix
        state["moments"]["first"].lerp_(rotated, 1 - beta1)
        state["moments"]["second"].lerp_(rotated.square(), 1 - beta2)
        update = basis @ (state["moments"]["first"] / (state["moments"]["second"].sqrt() + 1e-8))
        parameter.sub_(update.view(gradient.shape), alpha=group["lr"] * state["scale"] / group["step"] ** 0.5)
        if state["basis"] and group["step"] % 2 == 0:
            state["basis"] = [torch.linalg.qr(matrix @ matrix.T @ basis)[0].T.contiguous().T]


class Plain(torch.optim.Optimizer):
    """Steps against the sign of the gradients; the base of the bad ones."""

    def __init__(self, params: ParamsT, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_one(parameter, parameter.grad, group)

    def step_one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        parameter.sub_(gradient.sign(), alpha=group["lr"])


class Coupled(Plain):
    """Limits the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [
            each.grad for group in self.param_groups for each in group["params"] if each.grad is not None
        ]
        if gradients:
            total = torch.stack([each.norm() for each in gradients]).norm()
            for gradient in gradients:
                gradient.mul_(1 / total.clamp(min=1.0))
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"])


class NeedsClosure(Plain):
    """Computes the loss again."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()


class SparseOnly(Plain):
    """Wants sparse gradients."""

    def step_one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        if not gradient.is_sparse:
            raise RuntimeError("expected sparse gradients")


class ObjectState(Plain):
    """Keeps an object of its own."""

    def step_one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        self.state[parameter]["inner"] = {"object": [object()]}


class LateState(Plain):
    """Adds an entry in its second step."""

    def step_one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["late" if "early" in state else "early"] = gradient.clone()


class CountsInItself(Plain):
    """Counts steps in an attribute."""

    count = 0

    def step_one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        self.count += 1
        super().step_one(parameter, gradient, group)


class LearnsItsRate(Plain):
    """Writes what it finds in gradients to its group."""

    def step_one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        group["seen"] = max(group.get("seen", 0.0), gradient.abs().max().item())


class Wrapper(Plain):
    """Steps another optimizer of the same param groups."""

    def __init__(self, params: ParamsT, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.base = [{"inner": torch.optim.SGD(self.param_groups, lr=lr)}]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base[0]["inner"].step()


class OwnList(Plain):
    """Keeps the parameters in an object made at construction."""

    def __init__(self, params: ParamsT, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.lists = {0: Tensors([each for group in self.param_groups for each in group["params"]])}


class Tensors:
    """A list of tensors."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)


class StepsNothing(Plain):
    """Leaves the tensors as they are."""

    def step_one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        self.state[parameter]["momentum"] = gradient.clone()


class TwoEntries(Plain):
    """Has one tensor as two entries of its state."""

    def step_one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
            state["views"] = [state["momentum"]]
        state["momentum"].lerp_(gradient, 0.1)
        parameter.sub_(state["views"][0], alpha=group["lr"])


class SharesTheParameter(Plain):
    """Has the parameter as an entry of its state."""

    def step_one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        self.state[parameter]["weights"] = parameter.detach()
        super().step_one(parameter, gradient, group)


class CountsInTensors(Plain):
    """Counts steps in tensors of its param groups, in a list. Scales of the rate by the count."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group.setdefault("counts", [torch.zeros(2)])[0].add_(1.0)
        super().step()

    def step_one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        parameter.sub_(gradient.sign(), alpha=group["lr"] / group["counts"][0][0].item())


class LaterState(Plain):
    """Adds an entry in its fifth step."""

    def step_one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["steps"] = state.get("steps", 0) + 1
        if state["steps"] == 5:
            state["momentum"] = gradient.clone()
        super().step_one(parameter, gradient, group)


class RandomLater(Plain):
    """Draws random numbers in its fifth step."""

    def step_one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["steps"] = state.get("steps", 0) + 1
        if state["steps"] == 5:
            gradient = gradient + torch.randn_like(gradient)
        super().step_one(parameter, gradient, group)


class StateOfSmall(Plain):
    """Has momentum for small tensors alone, as Shampoo has no factors for large ones."""

    def step_one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        if max(parameter.shape, default=1) > 15:
            super().step_one(parameter, gradient, group)
            return
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(gradient, 0.1)
        parameter.sub_(state["momentum"], alpha=group["lr"])


class OwnMasters(Plain):
    """Has a state entry with a name that checkpoints use."""

    def step_one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        self.state[parameter]["master"] = parameter.clone()


class FailsLater(Plain):
    """Raises in a step on one tensor of the model."""

    def step_one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        if tuple(parameter.shape) == (13, 24):
            raise ArithmeticError("no root")
        super().step_one(parameter, gradient, group)
