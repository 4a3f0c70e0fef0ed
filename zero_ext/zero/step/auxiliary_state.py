"""State that updates keep beside the optimizer's, as checkpoints see it."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

import torch

from zero_ext.zero.units.flat_layout import FlatLayout


class Room(enum.Enum):
    """Of which elements of a unit a rank holds values of one kind, float32."""

    OWN = "own"  # of all, and no other rank has the same
    SHARD = "shard"  # of its shard, as the other ranks of theirs
    SHARED = "shared"  # of all, the same on all ranks


class Kept(NamedTuple):
    """Values of the elements from ``begin`` on of the unit of the master of this number."""

    kind: str
    number: int
    begin: int
    values: torch.Tensor
    room: Room

    def runs(self, layout: FlatLayout) -> Iterator[tuple[str, int, torch.Tensor]]:
        """By parameter, in the unit's ``layout``: its name, the first of its elements in memory order, and
        the values."""
        for overlap in layout.overlaps(self.begin, self.begin + self.values.numel()):
            values = self.values[overlap.range_start : overlap.range_start + overlap.numel]
            yield layout.specs[overlap.index].name, overlap.parameter_start, values
