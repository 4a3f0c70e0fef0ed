"""Cast a model's inputs to its compute precision."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point tensors among the arguments of ``model`` to ``dtype`` before each forward."""
    # A partial function, as a deep copy of the model contains it and has to be picklable.
    model.register_forward_pre_hook(partial(_cast_arguments, dtype), with_kwargs=True)


def end_casts(model: nn.Module) -> None:
    """Undo :func:`cast_inputs`."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, partial) and hook.func is _cast_arguments:
            del model._forward_pre_hooks[key]
            del model._forward_pre_hooks_with_kwargs[key]


def _cast_arguments(
    dtype: torch.dtype, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    return _cast(args, dtype), _cast(kwargs, dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) is dict:
        return {key: _cast(item, dtype) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value
