"""What stands for a parameter whose value is not here: it spoils, or refuses, what is computed with it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

# Answers to these questions are true of a placeholder too.
METADATA_NAMES = """
    shape size dim ndim ndimension numel nelement __len__ stride is_contiguous dtype device layout itemsize
    element_size nbytes names is_floating_point is_complex is_meta is_sparse is_quantized is_cuda is_cpu
    requires_grad requires_grad_ is_leaf grad grad_fn _version _backward_hooks __hash__ __setattr__
"""
METADATA = frozenset(METADATA_NAMES.split())
# Where it lies, and how it prints, say nothing about a value.
_PLACE_NAMES = """
    data_ptr untyped_storage storage_offset get_device is_non_overlapping_and_dense __repr__ __format__
"""
_HARMLESS = METADATA | frozenset(_PLACE_NAMES.split())
_REASON = "_zero_ext_refusal"


def has_nan(dtype: torch.dtype) -> bool:
    """Whether values of ``dtype`` can be NaN."""
    return dtype.is_floating_point or dtype.is_complex


def blanks(count: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Elements [count] to expand to placeholders: NaN, or 0 where the dtype has no NaN."""
    return torch.full((count,), float("nan") if has_nan(dtype) else 0, dtype=dtype, device=device)


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """One element of :func:`blanks` expanded to ``shape``, no memory."""
    return blanks(1, dtype, device)[0].expand(tuple(shape))


def are_blank(elements: torch.Tensor) -> torch.Tensor:
    """Which of ``elements`` are as :func:`blanks` made them: bool, of their shape."""
    return elements.isnan() if has_nan(elements.dtype) else elements == 0


def function_name(function: Callable[..., Any]) -> str:
    """The name that a function given to ``__torch_function__`` is known by; a property's is its own."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        name = getattr(getattr(function, "__self__", None), "__name__", "")
    return str(name)


def refuse_use(parameter: nn.Parameter, reason: str) -> None:
    """Until :func:`allow_use`, torch functions of ``parameter``, but for questions of metadata, raise
    ``RuntimeError(reason)``. For dtypes without NaN, whose placeholder would spoil nothing.

    It stays the same object and an instance of its class; ``type`` is a subclass meanwhile.
    """
    setattr(parameter, _REASON, reason)
    if not isinstance(parameter, _Refusing):
        parameter.__class__ = _refusing(type(parameter))


def allow_use(parameter: nn.Parameter) -> None:
    """Ends :func:`refuse_use`; nothing to do if it was not called."""
    if isinstance(parameter, _Refusing):
        parameter.__class__ = type(parameter).__mro__[2]
        delattr(parameter, _REASON)


class _Refusing:
    """Mixed into a parameter's class while its value is not here."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function_name(func) in _HARMLESS:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[misc]
        raise RuntimeError(next(_reasons((*args, *(kwargs or {}).values()))))


def _reasons(values: Sequence[Any]) -> Any:
    for value in values:
        if isinstance(value, _Refusing):
            yield vars(value)[_REASON]
        elif isinstance(value, list | tuple):
            yield from _reasons(value)


@functools.cache
def _refusing(kind: type) -> Any:
    return type(kind)(f"Released{kind.__name__}", (_Refusing, kind), {"__module__": kind.__module__})
