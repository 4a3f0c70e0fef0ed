"""Where a tile lies in the tensor that it was cut from. Pure arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch


def bounds(size: int, splits: int, what: str) -> list[tuple[int, int]]:
    """Begin and end of each of ``splits`` parts of ``size``, whose sizes differ by one at most.

    Raises ``ValueError`` naming ``what`` unless ``splits`` is an integer from 1 to ``size``.
    """
    if isinstance(splits, bool) or not isinstance(splits, int) or not 1 <= splits <= size:
        raise ValueError(f"{what}: got {splits!r}, an integer from 1 to {size} wanted")
    edges = [size * number // splits for number in range(splits + 1)]
    return list(itertools.pairwise(edges))


@dataclass(frozen=True)
class Place:
    """A tile of ``sizes`` at ``corner`` of the tensor ``name`` of ``shape``; both row-major, 1-D or 2-D."""

    name: str
    shape: tuple[int, ...]
    corner: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def stride(self) -> tuple[int, ...]:
        """Strides of the whole tensor."""
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The tile's view of ``whole`` [shape]."""
        for axis, (begin, size) in enumerate(zip(self.corner, self.sizes, strict=True)):
            whole = whole.narrow(axis, begin, size)
        return whole

    def runs(self, start: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """The tile's elements from ``start`` on as runs of the whole tensor: first element counted from
        ``start``, first element in the whole tensor, number of elements."""
        width, whole_width = math.prod(self.sizes[1:]), math.prod(self.shape[1:])
        left = self.corner[1] if len(self.corner) > 1 else 0
        position, end = start, start + numel
        while position < end:
            row, column = divmod(position, width)
            count = end - position if width == whole_width else min(width - column, end - position)
            yield position - start, (self.corner[0] + row) * whole_width + left + column, count
            position += count
