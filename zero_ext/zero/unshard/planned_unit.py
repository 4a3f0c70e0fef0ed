"""A unit with sizes only: memory plans and simulated steps run the prefetcher with it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from zero_ext.config import UnitConfig
from zero_ext.config.events import Bus
from zero_ext.zero.memory.gathered_unit import GatheredUnit, UnitSpec, UnitState
from zero_ext.zero.unshard.prefetcher import Prefetcher

P = TypeVar("P", bound="PlannedUnit")


class PlannedUnit(GatheredUnit):
    """A unit that only changes its state; subclasses note what each transition costs."""

    def __init__(self, spec: UnitSpec) -> None:
        self.spec = spec
        self.state = UnitState.RELEASED
        self.holders: set[object] = set()
        self.exact = True
        self._is_aside = False

    @property
    def is_aside(self) -> bool:
        """Return whether :meth:`set_aside` has been called last."""
        return self._is_aside

    @property
    def needs_early_gather(self) -> bool:
        """Return whether other ranks have shards of it."""
        return self.spec.world_size > 1

    def to_fetching(self, exact: bool = False) -> None:
        """Start to fetch the shard."""
        self.state = UnitState.FETCHING

    def to_gathering(self) -> None:
        """Start the all-gather."""
        self.state = UnitState.GATHERING

    def to_gathered(self) -> None:
        """End the all-gather."""
        self.state, self._is_aside = UnitState.GATHERED, False

    def set_aside(self) -> None:
        """Keep the values for the next use."""
        self.state, self._is_aside = UnitState.GATHERING, True

    def to_released(self) -> None:
        """Drop the values."""
        self.state, self._is_aside = UnitState.RELEASED, False

    def invalidate(self) -> None:
        """Do nothing: no values exist."""

    def written(self) -> list[int]:
        """Return nothing: no values exist."""
        return []

    def describe(self) -> str:
        """Return the name, for errors."""
        return f"unit '{self.spec.name}'"


class PlannedPasses(Generic[P]):
    """Forwards and backwards of a model that uses its parameters in the order of registration.

    A unit is needed while the module that has it runs, from the first to the last parameter of
    ``spec.gathered``. The prefetcher decides what is gathered besides, as in a step with a known order.
    Passes yield the number of each parameter while it is in use.
    """

    def __init__(self, units: Sequence[P], parameters: int, policy: UnitConfig) -> None:
        self._parameters = parameters
        self._prefetcher = Prefetcher(units, policy, Bus(), commit=_ignore, warn=_ignore)
        sharded = self._prefetcher.units
        # Of units that begin with the same parameter the longest belongs to the
        # outer module, which runs first.
        forward = sorted(sharded, key=lambda unit: (unit.spec.gathered[0], -unit.spec.gathered[1]))
        backward = sorted(
            (unit for unit in sharded if unit.spec.rereads),
            key=lambda unit: (-unit.spec.gathered[1], unit.spec.gathered[0]),
        )
        self._prefetcher.forward_order.expect(forward)
        self._prefetcher.backward_order.expect(backward)
        self._from_first, self._from_last = defaultdict[int, list[P]](list), defaultdict[int, list[P]](list)
        for unit in forward:
            self._from_first[unit.spec.gathered[0]].append(unit)
        for unit in backward:
            self._from_last[unit.spec.gathered[1]].append(unit)

    def forward(self, repeats: bool = False) -> Iterator[int]:
        """Run a forward; ``repeats``: another one like it follows, not backward."""
        order = self._prefetcher.forward_order
        order.begin(repeats)
        ending = defaultdict[int, list[P]](list)
        for number in range(self._parameters):
            for unit in self._from_first[number]:
                self._prefetcher.need(unit, self, order)
                ending[unit.spec.gathered[1]].append(unit)
            yield number
            for unit in reversed(ending[number]):  # the inner ones first
                self._prefetcher.release(unit, self, order)
        self._prefetcher.end_pass(order)

    def backward(self) -> Iterator[int]:
        """Run a backward, from the last parameter to the first."""
        order = self._prefetcher.backward_order
        self._prefetcher.begin_backward()
        ending = defaultdict[int, list[P]](list)
        for number in reversed(range(self._parameters)):
            for unit in self._from_last[number]:
                self._prefetcher.need(unit, self, order)
                ending[unit.spec.gathered[0]].append(unit)
            yield number
            for unit in ending[number]:
                self._prefetcher.release(unit, self)
        self._prefetcher.end_backward()

    def end(self) -> None:
        """Release everything."""
        self._prefetcher.release_all()


def _ignore(*_: object) -> None:
    """Do nothing: a planned unit is never written to, and whoever runs the step is warned."""
