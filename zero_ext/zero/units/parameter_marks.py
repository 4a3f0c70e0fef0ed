"""Marks on single parameters that are set before prepare, and attached tensors that decode their bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_ext.zero.units.released_params import plain_class

_EXPERT = "_zero_ext_expert_ranks"
_TIED = "_zero_ext_tie"


def mark_expert(parameter: nn.Parameter, ranks: Sequence[int]) -> None:
    """Mark ``parameter`` as an expert's, before :func:`zero_ext.prepare`. The experts are spread over
    ``ranks`` (of the world). Each of these has other experts of the same shapes."""
    setattr(parameter, _EXPERT, tuple(ranks))


def expert_ranks(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the ranks of :func:`mark_expert`, none for a parameter that every data-parallel rank has."""
    return getattr(parameter, _EXPERT, ())


def mark_experts_of(module: nn.Module, ranks: Sequence[int]) -> None:
    """Mark the parameters that ``module`` itself has, see :func:`mark_expert`. The module is marked, too."""
    setattr(module, _EXPERT, tuple(ranks))
    restore_expert_marks(module)


def has_marked_experts(module: nn.Module) -> bool:
    """Return whether :func:`mark_experts_of` has marked ``module``."""
    return _EXPERT in vars(module)


def restore_expert_marks(model: nn.Module) -> None:
    """Mark again what has replaced the parameters of marked modules: a copy, or ``Module.to``."""
    for module in filter(has_marked_experts, model.modules()):
        for parameter in module.parameters(recurse=False):
            mark_expert(parameter, getattr(module, _EXPERT))


def has_spread_experts(model: nn.Module) -> bool:
    """Return whether ranks have different experts, so that every forward pass is a collective of theirs."""
    return any(map(expert_ranks, model.parameters()))


def mean_over_senders(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """Return ``gradient`` as autograd computes it, divided by the number of ranks for an expert's parameter.
    An expert's gradient is the sum over the losses of all ranks that send samples to it."""
    senders = len(expert_ranks(parameter))
    return gradient / senders if senders else gradient


def adapted_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters, by name, to which PEFT's ``target_parameters`` adds adapters.

    PEFT wraps the module that has the parameter. Wrappers of several parameters of a module are nested.
    """
    found: dict[str, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        inner: Any = getattr(module, "base_layer", None)
        name = getattr(module, "parameter_name", None)
        while isinstance(getattr(inner, "base_layer", None), nn.Module):
            inner = inner.base_layer
        if isinstance(name, str) and isinstance(inner, nn.Module) and name in inner._parameters:
            parameter = inner._parameters[name]
            if parameter is not None:
                found[f"{prefix}.{name}"] = parameter
    return found


class Tie(NamedTuple):
    """``name`` of a parameter that is the same on ``ranks``, counted within the model-parallel group."""

    name: str
    ranks: tuple[int, ...]


def mark_tied(parameter: nn.Parameter, name: str, ranks: Sequence[int]) -> None:
    """Mark ``parameter`` as one that ``ranks`` of the model-parallel group have, with the same values. Call
    it before :func:`zero_ext.prepare`."""
    setattr(parameter, _TIED, Tie(name, tuple(ranks)))


def tie_of(parameter: nn.Parameter) -> Tie | None:
    """Return the mark that :func:`mark_tied` set."""
    return getattr(parameter, _TIED, None)


def shared_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return [each for each in names.values() if len(each) > 1]


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
