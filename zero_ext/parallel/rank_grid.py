"""A grid of ranks with named axes: their coordinates, and the groups along each axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class RankGrid:
    """Ranks 0 to N - 1 in a grid with named axes.

    Attributes:
        sizes: length of each axis.
        ranks: listed with the last axis varying fastest.

    Raises:
        ValueError: an axis is shorter than 1, or the ranks are not each there once.
    """

    sizes: Mapping[str, int]
    ranks: tuple[int, ...]

    @classmethod
    def counted(cls, sizes: Mapping[str, int]) -> RankGrid:
        """Return the grid of ranks in counting order, where neighbors differ along the last axis.

        Args:
            sizes: length of each axis.

        Returns:
            The grid.
        """
        return cls(sizes, tuple(range(math.prod(sizes.values()))))

    def __post_init__(self) -> None:
        for axis, length in self.sizes.items():
            if length < 1:
                raise ValueError(f"axis '{axis}': expected a length of at least 1, got {length}. Correct it.")
        volume = math.prod(self.sizes.values())
        if len(self.ranks) != volume or set(self.ranks) != set(range(volume)):
            raise ValueError(
                f"ranks of axes {dict(self.sizes)}: expected 0 to {volume - 1} once each for {volume} "
                f"positions, got {len(self.ranks)} ranks, {len(set(self.ranks))} different ones, the largest "
                f"{max(self.ranks, default=None)}. List every rank once."
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes in order."""
        return tuple(self.sizes)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank.

        Args:
            rank: the rank.

        Returns:
            Its position on each axis.

        Raises:
            ValueError: the rank is outside the grid.
        """
        if not 0 <= rank < len(self.ranks):
            raise ValueError(
                f"rank: expected 0 to {len(self.ranks) - 1}, got {rank}. Use a rank of the grid."
            )
        index = self.ranks.index(rank)
        found = {}
        for axis in reversed(self.axes):
            index, found[axis] = divmod(index, self.sizes[axis])
        return {axis: found[axis] for axis in self.axes}

    def rank(self, **coordinate: int) -> int:
        """Return the rank at a full coordinate.

        Args:
            **coordinate: a position on each axis.

        Returns:
            The rank.

        Raises:
            ValueError: the coordinate is partial or outside the grid.
        """
        if set(coordinate) != set(self.sizes):
            raise ValueError(
                f"coordinate: expected a position on each of {list(self.sizes)}, got {sorted(coordinate)}. "
                "Use matching() for fewer axes."
            )
        index = 0
        for axis, length in self.sizes.items():
            if not 0 <= coordinate[axis] < length:
                raise ValueError(
                    f"axis '{axis}': expected a position of 0 to {length - 1}, got {coordinate[axis]}. "
                    "Correct it."
                )
            index = index * length + coordinate[axis]
        return self.ranks[index]

    def matching(self, **coordinate: int) -> list[int]:
        """Return the ranks at a partial coordinate.

        Args:
            **coordinate: a position on some axes.

        Returns:
            The ranks, in the order of the grid.

        Raises:
            ValueError: there is no such axis.
        """
        self._check(sorted(coordinate))
        return [rank for at, rank in self._coordinates() if coordinate.items() <= at.items()]

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the ranks that differ in `axes` only.

        Args:
            *axes: names of axes.

        Returns:
            A list per coordinate on the other axes, in grid order.

        Raises:
            ValueError: there is no such axis.
        """
        self._check(axes)
        found: dict[tuple[int, ...], list[int]] = {}
        for at, rank in self._coordinates():
            others = tuple(position for axis, position in at.items() if axis not in axes)
            found.setdefault(others, []).append(rank)
        return list(found.values())

    def _check(self, axes: Iterable[str]) -> None:
        for axis in axes:
            if axis not in self.sizes:
                raise ValueError(f"axis: expected one of {list(self.sizes)}, got {axis!r}. Use one of these.")

    def _coordinates(self) -> Iterator[tuple[dict[str, int], int]]:
        coordinates = product(*(range(length) for length in self.sizes.values()))
        for at, rank in zip(coordinates, self.ranks, strict=True):
            yield dict(zip(self.sizes, at, strict=True)), rank
