"""Tensors of a module besides its parameters: buffers, inputs, attributes that share parameters' memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zero_ext.comm import Collectives
from zero_ext.zero.construction.grouping import OwnedParameter
from zero_ext.zero.units.parameter_marks import move_packed, packed_tensors
from zero_ext.zero.units.presharded import presharded_of
from zero_ext.zero.units.released_params import (
    GatheredParameter,
    ReleasedView,
    ViewSpec,
    origin,
    view_of_released,
)
from zero_ext.zero.units.unit import Unit

_WITH_MEMORY = (torch.Tensor, nn.Parameter, GatheredParameter)


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the live buffers of the state dict by all their names, and tensors attached to quantized
    parameters."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return {**found, **packed_tensors(model)}


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers of a model to the device of its future units. Meta buffers stay."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)
    move_packed(model, device)


def cast_running_statistics(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the running statistics of batch and instance norms to ``dtype``: their kernels refuse a mixture.

    Other buffers keep their precision, which a rotary embedding's frequencies need.
    """
    for module in model.modules():
        if isinstance(module, _NormBase):
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.to(dtype)


def broadcast_buffers(model: nn.Module, collectives: Collectives) -> None:
    """Broadcast rank 0's module buffers, and the tensors attached to quantized parameters."""
    for name, buffer in (*model.named_buffers(), *packed_tensors(model).items()):
        if buffer.numel() and not buffer.is_meta:
            value = buffer.data.contiguous()
            collectives.broadcast_(value.view(-1).view(torch.uint8), 0, f"buffer '{name}' from rank 0")
            # Then ``contiguous`` made a copy, and the copy has received the values.
            if value.data_ptr() != buffer.data_ptr():
                buffer.data.copy_(value)


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


def _cast_arguments(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return _cast(args, dtype), _cast(kwargs, dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) is dict:
        return {key: _cast(item, dtype) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value


class Alias(NamedTuple):
    """A tensor attribute of a module that is a view of a parameter's memory."""

    module: nn.Module
    attribute: str
    parameter: nn.Parameter
    view_spec: ViewSpec  # offset from the parameter's first element


class Memory(NamedTuple):
    """The bytes of a storage from a tensor's first to its last element."""

    storage: int
    begin: int  # bytes
    end: int

    def overlaps(self, other: Memory) -> bool:
        """Return whether both have a byte in common."""
        return self.storage == other.storage and self.begin < other.end and other.begin < self.end


def memory_of(tensor: torch.Tensor) -> Memory | None:
    """Return the memory of a tensor; None where there is none to share."""
    if type(tensor) not in _WITH_MEMORY or tensor.layout is not torch.strided:
        return None
    if tensor.is_meta or not tensor.numel():
        return None
    spans = ((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * tensor.itemsize
    return Memory(tensor.untyped_storage()._cdata, begin, begin + (1 + sum(spans)) * tensor.itemsize)


def two_over_one_memory(first: str, second: str) -> ValueError:
    """Return the error for two parameters that share memory."""
    return ValueError(
        f"parameters '{first}' and '{second}' are two over the same memory: expected one parameter under "
        "both names, as sharded they would drift apart. Assign the parameter itself (b.weight = a.weight), "
        "or give the second one a copy (.clone())."
    )


def find_aliases(model: nn.Module, owned: Sequence[OwnedParameter]) -> list[Alias]:
    """Return the attributes of modules that share memory with a parameter.

    Raises ``ValueError`` if two parameters, or a parameter and a buffer or an item of a container, share
    memory: once sharded they would drift apart.
    """
    by_storage: dict[int, list[tuple[Memory, OwnedParameter]]] = defaultdict(list)
    for item in owned:
        memory = memory_of(item.parameter) if presharded_of(item.parameter) is None else None
        if memory is None:
            continue
        for other, earlier in by_storage[memory.storage]:
            if memory.overlaps(other):
                raise two_over_one_memory(earlier.spec.name, item.spec.name)
        by_storage[memory.storage].append((memory, item))
    found: list[Alias] = []
    for prefix, module in model.named_modules():
        for attribute, tensor, fixed in _attribute_tensors(module):
            if isinstance(tensor, ReleasedView) and not fixed:
                parameter, view_spec = origin(tensor)
                found += [Alias(module, attribute, parameter, view_spec)] if view_spec is not None else []
                continue
            memory = memory_of(tensor)
            for other, item in by_storage.get(memory.storage, ()) if memory is not None else ():
                if memory is None or not memory.overlaps(other):
                    continue
                inside = other.begin <= memory.begin and memory.end <= other.end
                same = tensor.dtype == item.parameter.dtype and item.parameter.stride() == item.spec.stride
                if fixed or not inside or not same:
                    name = f"{prefix}.{attribute}" if prefix else attribute
                    raise ValueError(
                        f"'{name}' shares memory with parameter '{item.spec.name}': expected memory of its "
                        "own, as sharded they would drift apart. Give it a copy (.detach().clone()), or read "
                        "the parameter where it is used."
                    )
                offset = (memory.begin - other.begin) // tensor.itemsize
                view_spec = ViewSpec.of(tensor)._replace(offset=offset)
                found.append(Alias(module, attribute, item.parameter, view_spec))
    return found


def _attribute_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield buffers and other tensors of a module by name, and whether no view can replace them."""
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield name, buffer, True
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            yield name, value, False
        elif type(value) in (list, tuple, dict) and not name.startswith("_"):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter):
                    yield f"{name}[{key!r}]", item, True


def renew(aliases: Iterable[Alias], index: Mapping[nn.Parameter, tuple[Unit, int]]) -> None:
    """Make each attribute a view of its parameter's new memory, fetched when it is used where that is
    sharded."""
    for module, attribute, parameter, view_spec in aliases:
        unit, number = index[parameter]
        view_spec = view_spec._replace(dtype=unit.layout.dtype)
        if unit.placement.params:
            view: torch.Tensor = view_of_released(parameter, view_spec)
        else:
            view_spec = view_spec._replace(offset=view_spec.offset + unit.layout.offsets[number])
            view = view_spec.view_into(unit.flat)
        setattr(module, attribute, view)
