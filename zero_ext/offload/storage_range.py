"""Runs of values that lie in memory or in storage, under one roof for who copies them."""

from __future__ import annotations

from typing import Protocol

import torch


class StoredRun(Protocol):
    """``numel`` consecutive values in storage."""

    numel: int
    dtype: torch.dtype

    def read(self, begin: int, end: int) -> torch.Tensor:
        """A copy of the values [begin, end)."""

    def write(self, begin: int, values: torch.Tensor) -> None:
        """Replaces the values from ``begin`` on."""

    def part(self, begin: int, end: int) -> StoredRun:
        """The run of the values [begin, end)."""


Values = torch.Tensor | StoredRun  # a tensor is live memory, 1-D


def count(values: Values) -> int:
    """Number of values of a run."""
    return values.numel() if isinstance(values, torch.Tensor) else values.numel


def part_of(values: Values, begin: int, end: int) -> Values:
    """The run of the values [begin, end) of a run."""
    return values[begin:end] if isinstance(values, torch.Tensor) else values.part(begin, end)


def copy_of(values: Values) -> torch.Tensor:
    """All values of a run in memory of their own."""
    return values.clone() if isinstance(values, torch.Tensor) else values.read(0, values.numel)


def replace(values: Values, by: torch.Tensor) -> None:
    """Gives a run other values."""
    if isinstance(values, torch.Tensor):
        values.copy_(by)
    else:
        values.write(0, by.to(values.dtype).contiguous())
