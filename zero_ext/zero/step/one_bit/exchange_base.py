"""Base of the 1-bit exchange strategies: their auxiliary state, and the elements that are left out."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from zero_ext.comm import Collectives
from zero_ext.comm.onebit_all_reduce import OneBitAllReduce
from zero_ext.optim.one_bit_steppers import OneBitStepper
from zero_ext.zero.gradients.accumulator import UnitGradients
from zero_ext.zero.step.update_schedule import AuxiliaryState, Ownership
from zero_ext.zero.units.flat_layout import FlatLayout
from zero_ext.zero.units.master_weights import MasterShard

PREFIX = "one_bit_"


@dataclass(frozen=True)
class OneBitContext:
    """Inputs of an exchange strategy. Masters and gradients of the same number belong to one unit."""

    stepper: OneBitStepper
    masters: Sequence[MasterShard]
    gradients: Sequence[UnitGradients]
    collectives: Collectives


class ExchangeStrategy(ABC):
    """A step with a frozen variance. ``OWNERSHIP`` names the kinds of auxiliary state, which starts at
    zero."""

    OWNERSHIP: ClassVar[Mapping[str, Ownership]]
    SINGLE_RANK: ClassVar[bool] = False  # whether a single rank uses it, too

    def __init__(self, context: OneBitContext) -> None:
        self._context = context
        self._stepper = context.stepper
        self._ranks = context.collectives.world_size
        layouts = [master.unit.layout for master in context.masters]
        self._state = {
            kind: [
                torch.zeros(
                    layout.shard_numel if ownership is Ownership.SHARD else layout.numel,
                    dtype=torch.float32,
                    device=master.unit.flat.device,
                )
                for layout, master in zip(layouts, context.masters, strict=True)
            ]
            for kind, ownership in self.OWNERSHIP.items()
        }

    @abstractmethod
    def step(self, scale: float, used: frozenset[str], exchanges: bool) -> None:
        """Step with the unreduced gradients times ``scale``, for the parameters named in ``used``. A
        collective if it ``exchanges``."""

    def restore(self) -> None:
        """Update the parameters after the auxiliary state was loaded."""
        for master in self._context.masters:
            master.write_params()

    @classmethod
    def names(cls, collectives: Collectives) -> dict[str, str]:
        """Return the kinds' names in a checkpoint. Names of state of one rank contain rank and world size."""
        rank, ranks = collectives.rank, collectives.world_size
        suffix = {Ownership.OWN: f"_{rank}_of_{ranks}", Ownership.SHARD: f"_of_{ranks}", Ownership.SHARED: ""}
        return {kind: f"{PREFIX}{kind}{suffix[ownership]}" for kind, ownership in cls.OWNERSHIP.items()}

    def auxiliary_state(self) -> Iterator[AuxiliaryState]:
        """Yield the state of this rank that an exact resume needs."""
        for kind, name in self.names(self._context.collectives).items():
            ownership = self.OWNERSHIP[kind]
            for number, values in enumerate(self._state[kind]):
                begin = self._shard_begin(number) if ownership is Ownership.SHARD else 0
                yield AuxiliaryState(name, number, begin, values, ownership)

    def allocated_bytes(self) -> int:
        """Return the bytes on the device."""
        return sum(values.nbytes for each in self._state.values() for values in each)

    def _updating(self) -> list[int]:
        """Return the numbers of the masters of units with gradients on any rank."""
        return [number for number, each in enumerate(self._context.gradients) if each.contributed]

    def _layout(self, number: int) -> FlatLayout:
        return self._context.masters[number].unit.layout

    def _shard_begin(self, number: int) -> int:
        return self._layout(number).shard_range(self._context.collectives.rank)[0]

    def _exchange(self, number: int, what: str) -> OneBitAllReduce:
        unit = self._context.masters[number].unit
        name = f"{what} of {unit.describe()}"
        return OneBitAllReduce(self._context.collectives, unit.layout.numel, unit.flat.device, name)

    def _idle(self, number: int, used: frozenset[str]) -> list[tuple[int, int]]:
        """Return the elements that are left out: padding, and parameters that are not in ``used``."""
        layout = self._layout(number)
        unused = [
            (offset, offset + spec.numel)
            for spec, offset in zip(layout.specs, layout.offsets, strict=True)
            if spec.name not in used
        ]
        return [*layout.gaps, *unused]


@contextlib.contextmanager
def temporarily_zeroed(
    values: torch.Tensor, idle: Sequence[tuple[int, int]], begin: int = 0
) -> Iterator[None]:
    """Return a context that sets the ``idle`` elements of ``values`` to zero and restores them at its end.
    ``values`` [n] are the elements from ``begin`` on of the buffer that ``idle`` refers to."""
    end = begin + values.numel()
    slices = [
        values[max(first, begin) - begin : min(last, end) - begin]
        for first, last in idle
        if first < end and last > begin
    ]
    saved = [each.clone() for each in slices]
    for each in slices:
        each.zero_()
    try:
        yield
    finally:
        for each, before in zip(slices, saved, strict=True):
            each.copy_(before)
