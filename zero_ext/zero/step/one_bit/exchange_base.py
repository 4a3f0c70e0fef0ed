"""What the ways to exchange signs have in common: state beside the optimizer's, and what stays out of it."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from zero_ext.comm import Collectives
from zero_ext.comm.compressed import SignExchange
from zero_ext.optim.one_bit.onebit_stepper import OneBitStepper
from zero_ext.zero.gradients.accumulator import UnitGradients
from zero_ext.zero.step.auxiliary_state import Kept, Room
from zero_ext.zero.units.flat_layout import FlatLayout
from zero_ext.zero.units.master_weights import MasterShard

PREFIX = "one_bit_"


@dataclass(frozen=True)
class Parts:
    """What a way works on; masters and gradients of the same number belong together."""

    stepper: OneBitStepper
    masters: Sequence[MasterShard]
    gradients: Sequence[UnitGradients]
    collectives: Collectives


class Way(ABC):
    """One way to step with a frozen variance. ``ROOMS`` names the kinds of values that it keeps, zero at
    first."""

    ROOMS: ClassVar[Mapping[str, Room]]
    ALONE: ClassVar[bool] = False  # whether it is for a single rank as well

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._stepper = parts.stepper
        self._ranks = parts.collectives.world_size
        layouts = [master.unit.layout for master in parts.masters]
        self._kept = {
            kind: [
                torch.zeros(
                    layout.shard_numel if room is Room.SHARD else layout.numel,
                    dtype=torch.float32,
                    device=master.unit.flat.device,
                )
                for layout, master in zip(layouts, parts.masters, strict=True)
            ]
            for kind, room in self.ROOMS.items()
        }

    @abstractmethod
    def step(self, scale: float, used: frozenset[str], exchanges: bool) -> None:
        """One step from the unreduced gradients times ``scale``, for the parameters named in ``used``; a
        collective if it ``exchanges``."""

    def restore(self) -> None:
        """What is kept was loaded: the parameters follow it, where they are not the masters rounded."""
        for master in self._parts.masters:
            master.write_output()

    @classmethod
    def names(cls, collectives: Collectives) -> dict[str, str]:
        """The kinds' names in a checkpoint, which tell apart what belongs to one rank of so many."""
        rank, ranks = collectives.rank, collectives.world_size
        suffix = {Room.OWN: f"_{rank}_of_{ranks}", Room.SHARD: f"_of_{ranks}", Room.SHARED: ""}
        return {kind: f"{PREFIX}{kind}{suffix[room]}" for kind, room in cls.ROOMS.items()}

    def kept(self) -> Iterator[Kept]:
        """All that an exact resume needs of this rank."""
        for kind, name in self.names(self._parts.collectives).items():
            room = self.ROOMS[kind]
            for number, values in enumerate(self._kept[kind]):
                begin = self._shard_begin(number) if room is Room.SHARD else 0
                yield Kept(name, number, begin, values, room)

    def held_bytes(self) -> int:
        """Bytes on the device."""
        return sum(values.nbytes for each in self._kept.values() for values in each)

    def _updating(self) -> list[int]:
        """Numbers of the masters whose units have gradients on any rank."""
        return [number for number, each in enumerate(self._parts.gradients) if each.contributed]

    def _layout(self, number: int) -> FlatLayout:
        return self._parts.masters[number].unit.layout

    def _shard_begin(self, number: int) -> int:
        return self._layout(number).shard_range(self._parts.collectives.rank)[0]

    def _exchange(self, number: int, what: str) -> SignExchange:
        unit = self._parts.masters[number].unit
        name = f"{what} of {unit.describe()}"
        return SignExchange(self._parts.collectives, unit.layout.numel, unit.flat.device, name)

    def _idle(self, number: int, used: frozenset[str]) -> list[tuple[int, int]]:
        """The elements that take no part: padding, and parameters that are not in ``used``."""
        layout = self._layout(number)
        unused = [
            (offset, offset + spec.numel)
            for spec, offset in zip(layout.specs, layout.offsets, strict=True)
            if spec.name not in used
        ]
        return [*layout.gaps, *unused]


@contextlib.contextmanager
def resting(values: torch.Tensor, idle: Sequence[tuple[int, int]], begin: int = 0) -> Iterator[None]:
    """Inside, the ``idle`` elements of ``values`` are zero at first, and have their values again afterwards.
    ``values`` [n] are the elements from ``begin`` on of the buffer that ``idle`` counts in."""
    end = begin + values.numel()
    parts = [
        values[max(first, begin) - begin : min(last, end) - begin]
        for first, last in idle
        if first < end and last > begin
    ]
    before = [part.clone() for part in parts]
    for part in parts:
        part.zero_()
    try:
        yield
    finally:
        for part, kept in zip(parts, before, strict=True):
            part.copy_(kept)
