"""``deepspeed.pipe.topology``: which rank has which coordinates in a grid of parallelism."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

from zero_ext.integrations.deepspeed.unsupported import names_of
from zero_ext.parallel.rank_grid import RankGrid

_LEFT_OUT = ("data", "pipe")


class ProcessTopology:
    """A grid of ranks with named axes, counted row-major: the last axis varies fastest.

    ``axes`` are names, ``dims`` their lengths. Coordinates come as named tuples of class ``ProcessCoord``.
    ``ValueError`` for lists of different length, repeated names or lengths below 1.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or any(length < 1 for length in dims):
            raise ValueError(
                f"axes: expected different names, each with a length of at least 1, got {list(axes)} of "
                "lengths "
                f"{list(dims)}. Correct them."
            )
        self.axes = list(axes)
        self.dims = list(dims)
        coordinate: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        self.ProcessCoord = coordinate
        self._grid = RankGrid.counted(dict(zip(axes, dims, strict=True)))

    @property
    def mapping(self) -> dict[Any, int]:
        """Every coordinate's rank."""
        return {self.get_coord(rank): rank for rank in self._grid.ranks}

    def world_size(self) -> int:
        """Return number of ranks."""
        return len(self._grid.ranks)

    def get_axis_names(self) -> list[str]:
        """Return the axes in order."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Length of an axis; 0 for one that there is not."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coord: int) -> int:
        """Return the rank at a full coordinate. ``ValueError`` for a partial one or one outside the grid."""
        if set(coord) != set(self.axes):
            raise ValueError(
                f"get_rank: expected all of {self.axes}, got {sorted(coord)}. Use filter_match for fewer."
            )
        return self._grid.rank(**coord)

    def get_coord(self, rank: int) -> Any:
        """Return the coordinate of a rank. ``ValueError`` for one outside the grid."""
        return self.ProcessCoord(**self._grid.coordinate(rank))

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = _LEFT_OUT, inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return a rank's coordinates in a file name, like "model_01"; without ``omit_axes``."""
        coord = self.get_coord(rank)
        shown = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in shown)

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """For each line along ``axis`` its ranks; empty for an axis that there is not."""
        return self._grid.groups(axis) if axis in self.axes else []

    def filter_match(self, **coord: int) -> list[int]:
        """Return the ranks with coordinates that agree with all that are given. ``ValueError`` for an unknown
        axis.
        """
        return self._grid.matching(**coord)

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at ``idx`` of ``axis``."""
        return self.filter_match(**{axis: idx})

    def __str__(self) -> str:
        return str(self.mapping)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(axes={self.axes}, dims={self.dims}, ranks={math.prod(self.dims)})"


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline and data parallelism; ranks of one stage are neighbors."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline, data and model parallelism; ranks of one model-parallel group are neighbors."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


__getattr__ = names_of("deepspeed.runtime.pipe.topology")
