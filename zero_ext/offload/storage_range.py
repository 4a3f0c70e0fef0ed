"""Ranges of values in memory or in storage, behind one interface for code that copies them."""

from __future__ import annotations

from typing import Protocol

import torch


class StorageRange(Protocol):
    """``numel`` consecutive values in storage."""

    numel: int
    dtype: torch.dtype

    def read(self, begin: int, end: int) -> torch.Tensor:
        """A copy of the values [begin, end)."""

    def write(self, begin: int, values: torch.Tensor) -> None:
        """Replaces the values from ``begin`` on."""

    def subrange(self, begin: int, end: int) -> StorageRange:
        """The range of the values [begin, end)."""


Values = torch.Tensor | StorageRange  # a tensor is live memory, 1-D


def count(values: Values) -> int:
    """Return the number of values in a range."""
    return values.numel() if isinstance(values, torch.Tensor) else values.numel


def subrange_of(values: Values, begin: int, end: int) -> Values:
    """Return the values [begin, end) of a range, as a range."""
    return values[begin:end] if isinstance(values, torch.Tensor) else values.subrange(begin, end)


def copy_of(values: Values) -> torch.Tensor:
    """Return a copy of all values in a range."""
    return values.clone() if isinstance(values, torch.Tensor) else values.read(0, values.numel)


def replace(values: Values, by: torch.Tensor) -> None:
    """Replace all values in a range."""
    if isinstance(values, torch.Tensor):
        values.copy_(by)
    else:
        values.write(0, by.to(values.dtype).contiguous())
