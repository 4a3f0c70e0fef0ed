"""Refusals for calls that would break the link between parameters and their shards: pickling, conversions,
torch's own data parallelism."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.zero.unshard.hook_installation import uninstall

# The last is what DistributedDataParallel reads of a module first.
_GUARDED = ("__reduce_ex__", "__deepcopy__", "_apply", "share_memory", "_ddp_params_and_buffers_to_ignore")


def guard_module(model: nn.Module, sharded: Iterable[nn.Parameter]) -> None:
    """Make pickling, ``.to()`` and ``share_memory`` of ``model`` and its ``sharded`` parameters right, or an
    error that names the right call. DistributedDataParallel over it is such an error. A deep copy of
    ``model`` is an ordinary model with full values."""
    for parameter in sharded:
        parameter.__reduce_ex__ = _refuse_pickling  # type: ignore[method-assign]
        parameter.share_memory_ = _refuse_sharing  # type: ignore[method-assign]
    weak = weakref.ref(model)
    guards = (
        _refuse_pickling_of_model,
        _DeepCopy(weak),
        _Conversion(weak),
        _refuse_sharing,
        _NoDataParallel(),
    )
    for name, guard in zip(_GUARDED, guards, strict=True):
        object.__setattr__(model, name, guard)


def unguard(model: nn.Module, sharded: Iterable[nn.Parameter]) -> None:
    """Undo :func:`guard_module`."""
    for parameter in sharded:
        for name in ("__reduce_ex__", "share_memory_"):
            vars(parameter).pop(name, None)
    for name in _GUARDED:
        vars(model).pop(name, None)


def _refuse_pickling(*_: object) -> Any:
    raise RuntimeError(
        "pickling a sharded parameter: expected a whole value, got a part of it, as this "
        "rank has only that. Use zero_ext.full_state_dict(model), or copy inside 'with "
        "zero_ext.gathered(params):' by .clone()."
    )


def _refuse_pickling_of_model(*_: object) -> Any:
    raise RuntimeError(
        "pickling a prepared model: expected a plain one, got one with process groups, "
        "threads and hooks. Use zero_ext.full_state_dict(model) or zero_ext.save_checkpoint."
    )


def _refuse_sharing(*_: object) -> Any:
    raise RuntimeError(
        "share_memory(): expected a plain model, got a prepared one: it would move "
        "its parameters away from their shards. Share a plain copy of the model, filled from "
        "zero_ext.full_state_dict(model)."
    )


class _NoDataParallel:
    """Names to ignore, as DistributedDataParallel looks for them, which cannot be read."""

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError(
            "DistributedDataParallel: expected a model that is not prepared, got one from "
            "zero_ext.prepare, which reduces its gradients itself. Use the prepared model as it "
            "is. With Accelerate, pass only the loaders to accelerator.prepare."
        )


class _Guard:
    """Stands in for a method of a model, which it refers to weakly."""

    def __init__(self, model: weakref.ref[nn.Module]) -> None:
        self._weak = model

    @property
    def _model(self) -> nn.Module:
        model = self._weak()
        if model is None:
            raise zero_ext_bug("the guard of a deleted model was called")
        return model


class _DeepCopy(_Guard):
    """Copies a model without its guards and hooks."""

    def __call__(self, memo: dict[int, Any]) -> Any:
        model = self._model
        # ``copy.deepcopy`` looks methods up on the instance, so it would call this guard again.
        guards = {name: vars(model).pop(name) for name in _GUARDED}
        try:
            copied = copy.deepcopy(model, memo)
        finally:
            vars(model).update(guards)
        uninstall(copied)
        return copied


class _Conversion(_Guard):
    """``model._apply``: ``.to()``, ``.half()`` and the like pass if they change nothing."""

    def __call__(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        model = self._model
        tensors = [each for each in (*model.parameters(), *model.buffers()) if not each.is_meta]
        for dtype, device in {(tensor.dtype, tensor.device) for tensor in tensors}:
            moved = fn(torch.empty(0, dtype=dtype, device=device))
            if moved.dtype != dtype or _numbered(moved.device) != _numbered(device):
                raise RuntimeError(
                    f"{type(model).__name__}: expected no conversion after zero_ext.prepare, got .to(), "
                    ".half(), .bfloat16(), .cuda() or the like, which would break the link between "
                    "parameters and their shards. Convert the model, and move it to its device, before "
                    "prepare, or set 'precision.dtype' in the configuration."
                )
        return model


def _numbered(device: torch.device) -> torch.device:
    """``device`` with its number: "cpu" is "cpu:0"."""
    return torch.device(device.type, device.index or 0)
