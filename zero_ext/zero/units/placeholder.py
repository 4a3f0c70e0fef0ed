"""Placeholders of parameter values that are not in memory: NaN of the true shape."""

from __future__ import annotations

from collections.abc import Sequence

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
