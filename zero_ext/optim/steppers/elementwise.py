"""torch's own element-wise optimizers, run unchanged on the segments of flat fp32 shards."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zero_ext.config import Tier
from zero_ext.offload import MASTER, StepStaging, Values, put
from zero_ext.optim.elementwise_check import (
    elementwise_kinds,
    initial_state,
    live_scalars,
    on_other_tensors,
    per_element,
    plain_scalars,
)
from zero_ext.optim.steppers.non_finite_flag import NonFiniteFlag
from zero_ext.optim.steppers.stepper import OwnedRange, Segment, Update


class ElementwiseStepper:
    """Runs a copy of the user's optimizer over fp32 master segments, one unit's range at a time.

    Every rank keeps a segment for every parameter, empty where it owns no element, so that scalar state
    (step counts, averages' coefficients) is the same everywhere.
    """

    reads_scale_on_device = False

    def __init__(
        self, optimizer: torch.optim.Optimizer, ranges: Sequence[OwnedRange], staging: StepStaging
    ) -> None:
        self._live_groups = optimizer.param_groups
        self._inner = on_other_tensors(optimizer, [])
        self._ranges = tuple(ranges)
        self._staging = staging
        self._tensors = [
            [owned.state.read(MASTER, segment.begin, segment.end) for segment in owned.segments]
            for owned in ranges
        ]
        self._snapshots: dict[int, list[dict[str, Any] | None]] = {}  # by range, of each of its segments
        self._flag: NonFiniteFlag | None = None
        for owned, values in zip(self._ranges, self._tensors, strict=True):
            for segment, value in zip(owned.segments, values, strict=True):
                state = initial_state(optimizer, value, self._live_groups[segment.group])
                if state:
                    self._inner.state[value] = state

    def watch(self, flag: NonFiniteFlag) -> None:
        """Raise ``flag`` for master weights that are not finite after a step. See :meth:`Stepper.watch`."""
        self._flag = flag

    def step(self, updates: Sequence[Update], scale: torch.Tensor, used: frozenset[str]) -> Iterator[int]:
        """See :class:`Stepper`; the scaled gradient of one range exists in fp32 while it runs."""
        for update in updates:
            tier = self._ranges[update.index].state.tier
            scaled = self._staging.scaled(update.gradient, scale, tier)
            self._step_range(update.index, scaled, used)
            yield update.index

    def _step_range(self, index: int, scaled: torch.Tensor, used: frozenset[str]) -> None:
        owned, values = self._ranges[index], self._tensors[index]
        self._inner.param_groups = self._groups_over(index)
        for segment, value in zip(owned.segments, values, strict=True):
            if segment.name in used:
                value.grad = scaled[segment.begin : segment.end]
        self._inner.step()
        for segment, value in zip(owned.segments, values, strict=True):
            value.grad = None
            if self._flag is not None and segment.name in used:
                self._flag.check(value)
        if owned.output is not None and owned.output.tier == "nvme":
            # All of it, else the rest of a block would have to be read. Unchanged values are written again.
            self._staging.send(owned.state.read(MASTER, 0, owned.state.numel), owned.output, owned.state.tier)
        elif owned.output is not None:
            for segment, value in zip(owned.segments, values, strict=True):
                if segment.name in used:
                    put(owned.output, segment.begin, value, owned.state.tier)

    def _groups_over(self, index: int) -> list[dict[str, Any]]:
        groups = [{**group, "params": []} for group in self._live_groups]
        for segment, value in zip(self._ranges[index].segments, self._tensors[index], strict=True):
            groups[segment.group]["params"].append(value)
        return groups

    def snapshot(self, index: int) -> None:
        """See :class:`Stepper`."""
        self._ranges[index].state.snapshot()
        self._snapshots[index] = [
            copy.deepcopy(self._inner.state[value]) if value in self._inner.state else None
            for value in self._tensors[index]
        ]

    def commit(self, index: int) -> None:
        """See :class:`Stepper`."""
        self._ranges[index].state.commit()
        self._snapshots.pop(index, None)

    def rollback(self, index: int) -> None:
        """See :class:`Stepper`; state that the step created is dropped."""
        self._ranges[index].state.rollback()
        for value, state in zip(self._tensors[index], self._snapshots.pop(index), strict=True):
            if state is not None:
                self._inner.state[value] = state
            else:
                self._inner.state.pop(value, None)

    def values(self, index: int) -> Iterator[tuple[str, Segment, Values]]:
        """See :class:`Stepper`: every state entry that has one value an element."""
        for segment, value in zip(self._ranges[index].segments, self._tensors[index], strict=True):
            for name, entry in self._inner.state.get(value, {}).items():
                if per_element(entry):
                    yield name, segment, entry

    def scalars(self) -> dict[str, Any]:
        """See :class:`Stepper`: for every parameter its scalar entries, and the names of its tensor
        entries."""
        found: dict[str, Any] = {}
        for owned, values in zip(self._ranges, self._tensors, strict=True):
            for segment, value in zip(owned.segments, values, strict=True):
                found[segment.name] = plain_scalars(self._inner.state.get(value, {}))
        return found

    def load_scalars(self, state: dict[str, Any]) -> None:
        """See :class:`Stepper`."""
        for owned, values in zip(self._ranges, self._tensors, strict=True):
            for segment, value in zip(owned.segments, values, strict=True):
                self._inner.state[value].update(live_scalars(state[segment.name]))

    def make_state(self, kinds: Mapping[str, tuple[str, ...]]) -> Callable[[], None]:
        """See :class:`Stepper`."""
        possible = [elementwise_kinds(self._inner, group) for group in self._live_groups]
        made: list[tuple[torch.Tensor, str]] = []
        for owned, values in zip(self._ranges, self._tensors, strict=True):
            for segment, value in zip(owned.segments, values, strict=True):
                for name in possible[segment.group].intersection(kinds.get(segment.name, ())):
                    if name not in self._inner.state[value]:
                        self._inner.state[value][name] = torch.zeros_like(value)
                        made.append((value, name))

        def undo() -> None:
            for value, name in made:
                del self._inner.state[value][name]

        return undo

    def state_bytes(self) -> Mapping[Tier, int]:
        """See :class:`Stepper`."""
        nbytes: Counter[Tier] = Counter()
        for owned, values in zip(self._ranges, self._tensors, strict=True):
            for value in values:
                entries = self._inner.state.get(value, {}).values()
                nbytes[owned.state.tier] += sum(entry.nbytes for entry in entries if per_element(entry))
        return nbytes
