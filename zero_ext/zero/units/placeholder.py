"""Placeholders of values that are not in memory, NaN of the true shape, and specs of views of such values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch


def has_nan(dtype: torch.dtype) -> bool:
    """Return whether values of ``dtype`` can be NaN."""
    return dtype.is_floating_point or dtype.is_complex


def blanks(count: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return elements [count] to expand to placeholders: NaN, or 0 where the dtype has no NaN."""
    return torch.full((count,), float("nan") if has_nan(dtype) else 0, dtype=dtype, device=device)


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return one element of :func:`blanks` expanded to ``shape``, without memory of its own."""
    return blanks(1, dtype, device)[0].expand(tuple(shape))


def are_blank(elements: torch.Tensor) -> torch.Tensor:
    """Return which of ``elements`` equal those of :func:`blanks`: bool, of their shape."""
    return elements.isnan() if has_nan(elements.dtype) else elements == 0


Found = TypeVar("Found")


class ViewSpec(NamedTuple):
    """Shape, stride and offset of a view of a parameter's full value, in elements of ``dtype``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: torch.Tensor) -> ViewSpec:
        """Return the view spec of ``tensor`` in its storage."""
        return ViewSpec(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def on_meta(self) -> torch.Tensor:
        """Return a meta tensor with this layout."""
        return torch.empty(0, dtype=self.dtype, device="meta").as_strided(
            self.shape, self.stride, self.offset
        )

    def ordered(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value``, of this shape, with its elements in this order in memory: itself if they are."""
        if value.stride() == self.stride and value.storage_offset() == self.offset:
            return value
        memory = torch.empty_strided(self.shape, self.stride, dtype=value.dtype, device=value.device)
        return memory.copy_(value)

    def view_into(self, value: torch.Tensor) -> torch.Tensor:
        """Return the tensor that shares memory with ``value``, but neither autograd nor version counter."""
        empty = torch.empty(0, dtype=self.dtype, device=value.device)
        return empty.set_(value.untyped_storage(), self.offset, self.shape, self.stride)


def instances_in(value: Any, kind: type[Found]) -> Iterator[Found]:
    """Yield each instance of ``kind`` in ``value``, itself or in nested lists, tuples and dicts."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from instances_in(item, kind)


def map_nested(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Return ``value`` with ``replace`` applied to the items of nested lists, tuples and dicts."""
    if isinstance(value, dict):
        return {key: map_nested(item, replace) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [map_nested(item, replace) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        named = hasattr(value, "_fields")
        return type(value)(*items) if named else type(value)(items)
    return replace(value)
