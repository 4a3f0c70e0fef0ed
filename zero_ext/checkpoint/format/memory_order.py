"""Where a parameter's elements lie in memory: dense layouts, and the conversion back to logical order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Dimensions from the outermost to the innermost in memory; those of one element are left out.

    ValueError unless the elements fill ``prod(shape)`` places without holes or overlaps.
    """
    if len(shape) != len(stride):
        raise ValueError(f"shape {tuple(shape)} and stride {tuple(stride)} differ in length")
    if math.prod(shape) == 0:
        return ()
    order = sorted((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: -stride[dim])
    expected = 1
    for dim in reversed(order):
        if stride[dim] != expected:
            raise ValueError(
                f"stride {tuple(stride)} of shape {tuple(shape)} leaves holes or overlaps in memory; "
                "only dense layouts can be stored"
            )
        expected *= shape[dim]
    return tuple(order)


def is_logical_order(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """True when memory order is row-major order already."""
    order = memory_order(shape, stride)
    return list(order) == sorted(order)


def to_logical_order(flat: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """A row-major tensor of ``shape`` from its elements in memory order (``flat``, 1-D)."""
    return torch.as_strided(flat, tuple(shape), tuple(stride)).contiguous()
