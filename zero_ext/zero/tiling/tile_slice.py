"""Arithmetic of tiles as slices of the tensors that they were cut from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch


def bounds(size: int, splits: int, what: str) -> list[tuple[int, int]]:
    """Return begin and end of each of ``splits`` slices of ``size``. Their sizes differ by one at most.

    Raises ``ValueError`` naming ``what`` unless ``splits`` is an integer from 1 to ``size``.
    """
    if isinstance(splits, bool) or not isinstance(splits, int) or not 1 <= splits <= size:
        raise ValueError(
            f"{what}: expected an integer from 1 to {size}, got {splits!r}. Choose a number of "
            "tiles in that range."
        )
    edges = [size * number // splits for number in range(splits + 1)]
    return list(itertools.pairwise(edges))


@dataclass(frozen=True)
class TileSlice:
    """A tile of ``sizes`` at ``offset`` of the tensor ``name`` of ``shape``; both row-major, 1-D or 2-D."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def stride(self) -> tuple[int, ...]:
        """Strides of the full tensor."""
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))

    def view_in(self, full: torch.Tensor) -> torch.Tensor:
        """Return the tile's view of ``full`` [shape]."""
        for axis, (begin, size) in enumerate(zip(self.offset, self.sizes, strict=True)):
            full = full.narrow(axis, begin, size)
        return full

    def ranges(self, start: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """Yield the tile's elements from ``start`` on as contiguous ranges of the full tensor.

        Each is the first element counted from ``start``, the first element in the full tensor, and the number
        of elements.
        """
        width, full_width = math.prod(self.sizes[1:]), math.prod(self.shape[1:])
        left = self.offset[1] if len(self.offset) > 1 else 0
        position, end = start, start + numel
        while position < end:
            row, column = divmod(position, width)
            count = end - position if width == full_width else min(width - column, end - position)
            yield position - start, (self.offset[0] + row) * full_width + left + column, count
            position += count
