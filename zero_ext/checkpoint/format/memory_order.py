"""The memory order of a parameter's elements: dense layouts, and the conversion back to logical order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Dimensions from the outermost to the innermost in memory; those of one element are left out.

    ValueError unless the elements fill ``prod(shape)`` places without holes or overlaps.
    """
    if len(shape) != len(stride):
        raise ValueError(
            f"stride: expected {len(shape)} numbers, one for each of shape {tuple(shape)}, got "
            f"{tuple(stride)}. Pass one for each dimension."
        )
    if math.prod(shape) == 0:
        return ()
    order = sorted((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: -stride[dim])
    expected = 1
    for dim in reversed(order):
        if stride[dim] != expected:
            raise ValueError(
                f"stride: expected a dense layout of shape {tuple(shape)}, as only these can be stored, got "
                f"{tuple(stride)}, which leaves holes or overlaps in memory. Make the tensor contiguous."
            )
        expected *= shape[dim]
    return tuple(order)


def is_logical_order(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether memory order is row-major order already."""
    order = memory_order(shape, stride)
    return list(order) == sorted(order)


def to_logical_order(flat: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Return a row-major tensor of ``shape`` from its elements in memory order (``flat``, 1-D)."""
    return torch.as_strided(flat, tuple(shape), tuple(stride)).contiguous()
