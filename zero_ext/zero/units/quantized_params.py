"""Quantized weights: a parameter of packed bytes, with attached tensors (scales, codes) that decode them.

The tensors are attributes of the parameter, at any depth, as bitsandbytes' ``weight.quant_state.absmax``.
They are small, replicated on every rank, and part of the model's state like buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zero_ext.zero.units.released_params import plain_class

_DEPTH = 4
_OWN = "_zero_ext"
_NO_FUNCTIONS: Any = nn.Parameter.__torch_function__


def is_packed(parameter: nn.Parameter) -> bool:
    """Return whether tensors attached to ``parameter`` decode its bytes, so that it must not be cast."""
    return next(_attached(parameter), None) is not None


def refuse_packed(parameter: nn.Parameter, name: str) -> None:
    """Raise ``RuntimeError`` for a parameter ``name`` if only its class can use its value."""
    kind: Any = plain_class(parameter)
    if is_packed(parameter) or kind.__torch_function__ is not _NO_FUNCTIONS:
        raise RuntimeError(
            f"parameter '{name}' of class {kind.__name__}, sharded over the ranks: expected a use "
            "in the forward of its module, as the class gives its bytes a meaning of their own. "
            "Otherwise, use it inside 'with zero_ext.gathered(params):'."
        )


def packed_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the live attached tensors by ``<parameter>.<attribute>``, under every name of the parameter."""
    return {name: tensor for name, _, _, tensor in _everywhere(model)}


def move_packed(model: nn.Module, device: torch.device) -> None:
    """Move the attached tensors of all parameters to ``device``."""
    for _, owner, attribute, tensor in list(_everywhere(model)):
        setattr(owner, attribute, tensor.to(device))


def packed_shapes(parameter: nn.Parameter) -> list[tuple[str, tuple[int, ...], str]]:
    """Return name, shape and dtype of the tensors attached to ``parameter``."""
    return [(path, tuple(tensor.shape), str(tensor.dtype)) for path, _, _, tensor in _attached(parameter)]


def _everywhere(model: nn.Module) -> Iterator[tuple[str, object, str, torch.Tensor]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for path, owner, attribute, tensor in _attached(parameter):
            yield f"{name}.{path}", owner, attribute, tensor


def _attached(parameter: nn.Parameter) -> Iterator[tuple[str, object, str, torch.Tensor]]:
    # Attributes of an ordinary parameter are somebody's notes on it, not a part of its value.
    if plain_class(parameter) is not nn.Parameter or not parameter.dtype.is_floating_point:
        yield from _inside(parameter, "", _DEPTH)


def _inside(owner: object, prefix: str, depth: int) -> Iterator[tuple[str, object, str, torch.Tensor]]:
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        if name.startswith(_OWN) or isinstance(value, nn.Module | nn.Parameter | type) or callable(value):
            continue
        if isinstance(value, torch.Tensor):
            yield prefix + name, owner, name, value
        elif depth:
            yield from _inside(value, f"{prefix}{name}.", depth - 1)
