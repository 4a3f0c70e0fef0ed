"""The tensors in what a block returns: finding them, and giving them memory of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from zero_ext.zero.units.dtensor_local import is_distributed


def tensors_in(value: object, depth: int = 8) -> Iterator[torch.Tensor]:
    """Yield every tensor reachable in nested lists, tuples, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth:
        children: Iterable[object] = ()
        if isinstance(value, Mapping):
            children = value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            children = value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            children = (getattr(value, field.name) for field in dataclasses.fields(value))
        for child in children:
            yield from tensors_in(child, depth - 1)


def opaque_in(value: object, depth: int = 8) -> Iterator[object]:
    """Yield the objects inside ``value`` that :func:`tensors_in` cannot look into."""
    plain = (torch.Tensor, str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)
    if isinstance(value, plain):
        return
    if isinstance(value, Mapping):
        children: Iterable[object] = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        children = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        children = (getattr(value, field.name) for field in dataclasses.fields(value))
    else:
        yield value
        return
    for child in children if depth else ():
        yield from opaque_in(child, depth - 1)


def shares_memory(tensor: torch.Tensor, storages: Container[int]) -> bool:
    """Return whether the memory of ``tensor`` is one of ``storages``."""
    if is_distributed(tensor):
        tensor = tensor._local_tensor
    return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in storages


def with_own_memory(outputs: Any, storages: Container[int]) -> Any:
    """Return ``outputs`` with copies of the tensors in one of ``storages``, as it will be
    released. Autograd connects each copy to its original. Mutable containers and dataclasses are changed in
    place, others are made anew."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        copied: torch.Tensor = tensor
        if shares_memory(tensor, storages):
            copied = _OwnMemory.apply(tensor)
        return copied

    return _changed(outputs, own, 8)


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor], depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if not depth:
        return value
    if isinstance(value, MutableMapping):
        for key, item in list(value.items()):
            new = _changed(item, change, depth - 1)
            if new is not item:
                value[key] = new
    elif isinstance(value, list):
        value[:] = [_changed(item, change, depth - 1) for item in value]
    elif isinstance(value, tuple | set | frozenset):
        before = list(value)
        items = [_changed(item, change, depth - 1) for item in before]
        if any(new is not item for new, item in zip(items, before, strict=True)):
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            new = _changed(item, change, depth - 1)
            if new is not item:
                # Dataclasses may be frozen.
                object.__setattr__(value, field.name, new)
    elif isinstance(value, Mapping):
        pairs = [(key, item, _changed(item, change, depth - 1)) for key, item in value.items()]
        if any(new is not item for _, item, new in pairs):
            return _rebuilt(value, {key: new for key, _, new in pairs})
    return value


def _rebuilt(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return an immutable mapping of the class of ``value`` with ``items``."""
    try:
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError as error:
        raise TypeError(
            f"output of a block: expected a mapping that can be changed or made of a dict, got a "
            f"'{type(value).__name__}' with a view of the block's own parameter. Return a dict."
        ) from error


class _OwnMemory(torch.autograd.Function):
    """The same values and strides in memory of their own."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        if is_distributed(tensor) or tensor.is_conj() or tensor.is_neg():
            # ``set_`` below ignores lazy conjugation and negation, so values would change.
            return tensor.clone()
        # One copy from the first to the last element keeps all strides: gaps stay,
        # and what is expanded stays expanded.
        spans = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        extent = 1 + sum(spans) if tensor.numel() else 0
        memory = tensor.as_strided((extent,), (1,), tensor.storage_offset()).clone()
        # A second ``as_strided`` would return a view, and autograd forbids in-place
        # operations on views that a custom Function returns.
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(memory.untyped_storage(), 0, tensor.shape, tensor.stride())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]
