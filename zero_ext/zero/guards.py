"""Refusals for calls that would quietly read or break placeholders: state_dict, copies, dtype changes."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from zero_ext.zero.unit import Unit, UnitState

_GUARD_ATTRIBUTE = "_zero_ext_state_guard"
_PICKLING = ("__reduce_ex__", "__deepcopy__")


def guard_module(model: nn.Module, units: dict[nn.Parameter, Unit]) -> None:
    """Makes ``state_dict``, ``load_state_dict``, ``deepcopy``, pickling, ``.to()`` and ``share_memory`` on
    ``model`` or its modules right or an error that names the right call, for its sharded parameters."""
    guard = StateGuard({id(parameter): weakref.ref(unit) for parameter, unit in units.items()})
    object.__setattr__(model, _GUARD_ATTRIBUTE, guard)
    for module in model.modules():
        if any(parameter in units for parameter in module._parameters.values()):
            _guard_state_dict(module, guard)
    for parameter in units:
        _guard_copies(parameter)
    _guard_pickling(model)
    model._apply = ApplyGuard(model)  # type: ignore[method-assign]
    model.share_memory = _refuse_sharing  # type: ignore[method-assign]


class StateGuard:
    """Knows which parameters of a module are released; ``keys_only`` lets ``state_dict`` pass."""

    def __init__(self, units: dict[int, weakref.ref[Unit]]) -> None:
        self._units = units
        self.keys_only = False

    def __deepcopy__(self, memo: dict[int, Any]) -> StateGuard:
        return StateGuard({})

    def released(self, module: nn.Module) -> str | None:
        """The name of a parameter of ``module`` itself that is not here."""
        for name, parameter in module._parameters.items():
            reference = self._units.get(id(parameter))
            unit = reference() if reference is not None else None
            if unit is not None and unit.state is not UnitState.GATHERED:
                return name
        return None


@contextlib.contextmanager
def state_keys_only(model: nn.Module) -> Iterator[None]:
    """Inside, ``state_dict`` of a sharded model's modules gives placeholders in the place of values: for
    libraries that ask for it to learn keys."""
    guard: StateGuard = vars(model)[_GUARD_ATTRIBUTE]
    before, guard.keys_only = guard.keys_only, True
    try:
        yield
    finally:
        guard.keys_only = before


def _guard_state_dict(module: nn.Module, guard: StateGuard) -> None:
    def before_save(owner: nn.Module, prefix: str, keep_vars: bool) -> None:
        name = None if guard.keys_only else guard.released(owner)
        if name is not None:
            raise RuntimeError(
                f"state_dict(): parameter '{prefix}{name}' is sharded over the ranks. Call "
                "zero_ext.full_state_dict(model) on every rank, or zero_ext.save_checkpoint."
            )

    def before_load(owner: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        name = guard.released(owner)
        if name is not None:
            raise RuntimeError(
                f"load_state_dict(): parameter '{prefix}{name}' is sharded over the ranks. Call "
                "zero_ext.load_full_state_dict(model, state_dict) on every rank, or zero_ext.load_checkpoint."
            )

    module.register_state_dict_pre_hook(before_save)
    module.register_load_state_dict_pre_hook(before_load)


def _guard_copies(parameter: nn.Parameter) -> None:
    def refuse(*_: object) -> Any:
        raise RuntimeError(
            "a sharded parameter cannot be copied or pickled: this rank holds only a part of it. Use "
            "zero_ext.full_state_dict(model), or copy inside 'with zero_ext.gathered(params):' by .clone()."
        )

    parameter.__deepcopy__ = refuse  # type: ignore[method-assign]
    parameter.__reduce_ex__ = refuse  # type: ignore[method-assign]
    parameter.share_memory_ = refuse  # type: ignore[method-assign]


def _guard_pickling(model: nn.Module) -> None:
    """Refuse pickling of ``model``, and still let it be copied where its parameters can be."""
    weak = weakref.ref(model)

    def refuse(*_: object) -> Any:
        raise RuntimeError(
            "a prepared model cannot be pickled: it holds process groups, threads and hooks. Use "
            "zero_ext.full_state_dict(model) or zero_ext.save_checkpoint."
        )

    def plain_copy(memo: dict[int, Any]) -> Any:
        original = weak()
        if original is None:
            raise AssertionError("the guard of a deleted model was called")
        own = {name: vars(original).pop(name) for name in _PICKLING}
        try:
            return copy.deepcopy(original, memo)
        finally:
            vars(original).update(own)

    for name, guard in zip(_PICKLING, (refuse, plain_copy), strict=True):
        object.__setattr__(model, name, guard)


def _refuse_sharing() -> Any:
    raise RuntimeError(
        "share_memory() would move parameters away from their shards. Share a plain copy of the model, "
        "filled from zero_ext.full_state_dict(model)."
    )


class ApplyGuard:
    """Stands in for ``model._apply``: ``.to()``, ``.half()`` and the like pass if they change nothing.

    A deep copy of a model is an ordinary model again, so its copy of the guard does not refuse.
    """

    def __init__(self, model: nn.Module | None, active: bool = True) -> None:
        self._model = weakref.ref(model) if model is not None else lambda: None
        self._active = active

    def __deepcopy__(self, memo: dict[int, Any]) -> ApplyGuard:
        model = self._model()
        return ApplyGuard(memo.get(id(model), model), active=False)

    def __call__(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        model = self._model()
        if model is None:
            raise AssertionError("the guard of a deleted model was called")
        if not self._active:
            return type(model)._apply(model, fn, recurse)
        tensors = [each for each in (*model.parameters(), *model.buffers()) if not each.is_meta]
        for dtype, device in {(tensor.dtype, tensor.device) for tensor in tensors}:
            probe = torch.empty(0, dtype=dtype, device=device)
            if fn(probe) is not probe:
                raise RuntimeError(
                    f"{type(model).__name__}: .to(), .half(), .bfloat16(), .cuda() and the like would "
                    f"break the "
                    "link between parameters and their shards. Convert the model, and move it to its device, "
                    "before zero_ext.prepare, or set 'precision.dtype' in the configuration."
                )
        return model
