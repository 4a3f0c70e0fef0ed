"""What ``param.grad`` is while a rank holds only a part of the gradient, or none of it in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

aten = torch.ops.aten


class GradientAccess(Protocol):
    """How a placeholder reaches the gradient it stands for."""

    def norm_of(self, key: object, norm_type: float) -> torch.Tensor:
        """The norm over all ranks of one parameter's gradient, 0-d float32. A collective."""

    def scale(self, key: object, factor: torch.Tensor | float) -> None:
        """Multiplies this rank's part of one parameter's gradient."""

    def zero(self, key: object) -> None:
        """Sets this rank's part of one parameter's gradient to zero."""


class ShardedGradient(torch.Tensor):
    """Stands for a gradient of which this rank holds a shard, or that lies on NVMe, with the shape
    and dtype of its parameter.

    Norms (2 and inf) are the true global ones and must be taken on every rank, so that
    ``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` are right; scaling in place and ``zero_``
    act on the shard. Everything else raises ``RuntimeError`` naming the call that gives the whole gradient.
    """

    _access: GradientAccess
    _key: object
    _name: str

    @staticmethod
    def __new__(cls, like: torch.Tensor, access: GradientAccess, key: object, name: str) -> ShardedGradient:
        made: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device, requires_grad=False
        )
        made._access, made._key, made._name = access, key, name
        return made

    def __init__(self, like: torch.Tensor, access: GradientAccess, key: object, name: str) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedGradient('{self._name}', shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        subject = args[0] if isinstance(args[0], list | tuple) else args[:1]
        if handler is not None and all(isinstance(item, ShardedGradient) for item in subject):
            return handler(*args, **(kwargs or {}))
        name = next((arg._name for arg in _flat(args) if isinstance(arg, ShardedGradient)), "?")
        raise RuntimeError(
            f"the gradient of '{name}' is sharded over the ranks or lies on NVMe, and {func} needs all of "
            "it. Use model.clip_grad_norm_(max_norm) to clip, zero_ext.full_gradient(param) for the whole "
            "gradient on every rank; optimizer.step() unscales and clips by itself when the configuration "
            "says so."
        )


def _flat(values: Any) -> list[Any]:
    found: list[Any] = []
    for value in values:
        found += _flat(value) if isinstance(value, list | tuple) else [value]
    return found


def _vector_norm(
    gradient: ShardedGradient,
    ord: float = 2,
    dim: object = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    if dim or keepdim:
        raise RuntimeError(
            f"the gradient of '{gradient._name}' is sharded over the ranks: norms over single dims need all "
            "of it; use zero_ext.full_gradient(param)"
        )
    return gradient._access.norm_of(gradient._key, float(ord)).to(dtype or gradient.dtype)


def _norm(gradient: ShardedGradient, p: float | None = None, *_: object) -> torch.Tensor:
    return _vector_norm(gradient, 2 if p is None else p)


def _foreach_norm(gradients: list[ShardedGradient], ord: float = 2, dtype: Any = None) -> list[torch.Tensor]:
    return [_vector_norm(gradient, ord, dtype=dtype) for gradient in gradients]


def _scale(gradient: ShardedGradient, factor: torch.Tensor | float) -> ShardedGradient:
    if isinstance(factor, torch.Tensor) and factor.numel() != 1:
        raise RuntimeError(
            f"the gradient of '{gradient._name}' is sharded over the ranks: one number can scale it, not a "
            f"tensor of shape {tuple(factor.shape)}; zero_ext.full_gradient(param) gives the whole gradient"
        )
    gradient._access.scale(gradient._key, factor)
    return gradient


def _divide(gradient: ShardedGradient, divisor: torch.Tensor | float) -> ShardedGradient:
    return _scale(gradient, 1.0 / divisor)


def _zero(gradient: ShardedGradient) -> ShardedGradient:
    gradient._access.zero(gradient._key)
    return gradient


def _foreach_scale(gradients: list[ShardedGradient], factor: torch.Tensor | float) -> None:
    for gradient in gradients:
        _scale(gradient, factor)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.linalg_vector_norm.default: _vector_norm,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dim: lambda gradient, p=2, dim=None, keepdim=False: _vector_norm(
        gradient, p, dim, keepdim
    ),
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.mul_.Tensor: _scale,
    aten.mul_.Scalar: _scale,
    aten.div_.Tensor: _divide,
    aten.div_.Scalar: _divide,
    aten._foreach_mul_.Tensor: _foreach_scale,
    aten._foreach_mul_.Scalar: _foreach_scale,
    aten.zero_.default: _zero,
    aten.detach.default: lambda gradient: gradient,
}
