"""Ranges of values in memory or in storage, behind one interface for code that copies them."""

from __future__ import annotations

from collections.abc import Callable

import torch


class StorageRange:
    """``numel`` consecutive values in storage, from ``begin`` on.

    ``read`` returns a copy of the values between two positions in storage. ``write`` replaces the values from
    a position on.
    """

    def __init__(
        self,
        begin: int,
        numel: int,
        dtype: torch.dtype,
        read: Callable[[int, int], torch.Tensor],
        write: Callable[[int, torch.Tensor], object],
    ) -> None:
        self.numel = numel
        self.dtype = dtype
        self._begin = begin
        self._read = read
        self._write = write

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return a copy of the values [begin, end) of the range."""
        return self._read(self._begin + begin, self._begin + end)

    def write(self, begin: int, values: torch.Tensor) -> None:
        """Replace the values of the range from ``begin`` on."""
        if values.numel():
            self._write(self._begin + begin, values)

    def subrange(self, begin: int, end: int) -> StorageRange:
        """Return the values [begin, end) as a range."""
        return StorageRange(self._begin + begin, end - begin, self.dtype, self._read, self._write)


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
