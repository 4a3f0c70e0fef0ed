"""One optimizer over ranges in several tiers, each kind of tier with a stepper of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from zero_ext.config import Tier
from zero_ext.offload import Values
from zero_ext.optim.steppers.non_finite_flag import NonFiniteFlag
from zero_ext.optim.steppers.stepper import Segment, Stepper, Update


class MultiTierStepper:
    """Hands every range to one of several steppers: a :class:`Stepper`. A parameter is in one range.

    ``steppers`` are steppers with the indices, counted here, of the ranges that they were made for.
    """

    reads_scale_on_device = False

    def __init__(self, steppers: Sequence[tuple[Stepper, Sequence[int]]]) -> None:
        self._steppers = [(stepper, tuple(indices)) for stepper, indices in steppers]
        self._owner = {
            index: (stepper, local)
            for stepper, indices in self._steppers
            for local, index in enumerate(indices)
        }

    def step(self, updates: Sequence[Update], scale: torch.Tensor, used: frozenset[str]) -> Iterator[int]:
        """See :class:`Stepper`."""
        for stepper, indices in self._steppers:
            own = [
                replace(update, index=indices.index(update.index))
                for update in updates
                if update.index in indices
            ]
            for local in stepper.step(own, scale, used):
                yield indices[local]

    def watch(self, flag: NonFiniteFlag) -> None:
        """Raise ``flag`` for results that are not finite. See :meth:`Stepper.watch`."""
        for stepper, _ in self._steppers:
            stepper.watch(flag)

    def snapshot(self, index: int) -> None:
        """See :class:`Stepper`."""
        stepper, local = self._owner[index]
        stepper.snapshot(local)

    def commit(self, index: int) -> None:
        """See :class:`Stepper`."""
        stepper, local = self._owner[index]
        stepper.commit(local)

    def rollback(self, index: int) -> None:
        """See :class:`Stepper`."""
        stepper, local = self._owner[index]
        stepper.rollback(local)

    def values(self, index: int) -> Iterator[tuple[str, Segment, Values]]:
        """See :class:`Stepper`."""
        stepper, local = self._owner[index]
        return stepper.values(local)

    def scalars(self) -> dict[str, Any]:
        """See :class:`Stepper`."""
        return {name: entry for stepper, _ in self._steppers for name, entry in stepper.scalars().items()}

    def load_scalars(self, state: dict[str, Any]) -> None:
        """See :class:`Stepper`."""
        for stepper, _ in self._steppers:
            stepper.load_scalars(state)

    def make_state(self, kinds: Mapping[str, tuple[str, ...]]) -> Callable[[], None]:
        """See :class:`Stepper`."""
        undo = [stepper.make_state(kinds) for stepper, _ in self._steppers]

        def undo_all() -> None:
            for each in undo:
                each()

        return undo_all

    def state_bytes(self) -> Mapping[Tier, int]:
        """See :class:`Stepper`."""
        nbytes: Counter[Tier] = Counter()
        for stepper, _ in self._steppers:
            nbytes.update(stepper.state_bytes())
        return nbytes
