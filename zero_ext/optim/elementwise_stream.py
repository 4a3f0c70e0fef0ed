"""torch's own element-wise optimizers on state on NVMe, one chunk at a time, and next to state in memory."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from zero_ext.config import Tier
from zero_ext.offload import MASTER, NvmeState, Values
from zero_ext.optim.elementwise import (
    check_saved_scalars,
    elementwise_kinds,
    initial_state,
    live_scalars,
    on_other_tensors,
    per_element,
    plain_scalars,
    scalars_of,
)
from zero_ext.optim.stepper import (
    ElementRanges,
    NonFiniteFlag,
    RangeStepper,
    Segment,
    Stepper,
    StepperInputs,
    StoredChunk,
    UnshardedState,
    Update,
    segments_to_step,
    send_chunk,
    stored_chunks,
    stored_state,
)


class ElementwiseStream(RangeStepper):
    """Runs a copy of the user's optimizer over chunks of fp32 master segments; the next chunk is read and the
    last one written meanwhile. Scalar state (step counts, averages' coefficients) stays in memory, one set a
    parameter.
    """

    def __init__(self, inputs: StepperInputs) -> None:
        super().__init__(inputs)
        optimizer = inputs.optimizer
        self._inner = on_other_tensors(optimizer, [])
        self._kinds = [elementwise_kinds(optimizer, group) for group in self._groups]
        self._scalars: dict[str, dict[str, Any]] = {}
        self._snapshots: dict[int, tuple[dict[str, dict[str, Any]], dict[str, bool]]] = {}
        self._made: dict[str, bool] = {}  # whether a parameter's state exists: from its first step on
        for owned in self._ranges:
            for segment in owned.segments:
                state = initial_state(optimizer, torch.zeros(1, device="cpu"), self._groups[segment.group])
                self._scalars[segment.name] = scalars_of(state)
                self._made[segment.name] = bool(state)
                for name, entry in state.items():
                    if per_element(entry) and entry[0] != 0:  # storage is zero from the start
                        _fill(stored_state(owned), name, segment, float(entry[0]))

    def step(self, updates: Sequence[Update], scale: torch.Tensor, used: frozenset[str]) -> Iterator[int]:
        """See :class:`Stepper`; the gradient of one chunk exists in fp32 while it runs."""
        after: dict[str, dict[str, Any]] = {}
        ranges = {update.index: update.ranges for update in updates}
        with contextlib.closing(stored_chunks(self._staging, self._ranges, updates)) as chunks:
            for chunk in chunks:
                after.update(self._step_chunk(chunk, scale, used, ranges[chunk.state.index]))
        for name, scalars in after.items():
            self._scalars[name], self._made[name] = scalars, True
        yield from (update.index for update in updates)

    def _step_chunk(
        self, stored: StoredChunk, scale: torch.Tensor, used: frozenset[str], ranges: ElementRanges | None
    ) -> dict[str, dict[str, Any]]:
        """Step one chunk and return the scalars that its parameters have afterwards."""
        chunk, gradient = stored.state, stored.staging.gradient
        owned, values = self._ranges[chunk.index], chunk.values
        begin, end = chunk.begin, chunk.end
        gradient[: end - begin].copy_(stored.gradient).mul_(scale)
        groups: list[dict[str, Any]] = [{**group, "params": []} for group in self._groups]
        stepped: list[tuple[Segment, torch.Tensor]] = []
        for segment in segments_to_step(owned.segments, used, ranges):
            first, last = max(segment.begin, begin), min(segment.end, end)
            # A rank without elements of a parameter steps an empty one, to have its scalars.
            empty = segment.numel == 0 and begin == 0
            if first >= last and not empty:
                continue
            elements = slice(first - begin, last - begin) if first < last else slice(0, 0)
            value = values[MASTER][elements]
            value.grad = gradient[elements]
            self._inner.state[value] = self._state_of(segment, values, elements)
            groups[segment.group]["params"].append(value)
            stepped.append((segment, value))
        if not stepped:
            return {}
        self._inner.param_groups = groups
        self._inner.step()
        for segment, value in stepped:
            self._copy_new_state(segment, value, values, begin)
            if self._flag is not None:
                self._flag.check(value)
        chunk.changed = True
        starts = [max(segment.begin, begin) - begin for segment, _ in stepped]
        spans = [(first, first + value.numel()) for first, (_, value) in zip(starts, stepped, strict=True)]
        send_chunk(owned.output, stored, spans)
        found = {segment.name: scalars_of(self._inner.state[value]) for segment, value in stepped}
        self._inner.state.clear()
        return found

    def _state_of(
        self, segment: Segment, values: Mapping[str, torch.Tensor], elements: slice
    ) -> dict[str, Any]:
        if not self._made[segment.name]:
            return {}
        scalars = {
            name: entry.clone() if isinstance(entry, torch.Tensor) else entry
            for name, entry in self._scalars[segment.name].items()
        }
        return {**scalars, **{kind: values[kind][elements] for kind in self._kinds[segment.group]}}

    def _copy_new_state(
        self, segment: Segment, value: torch.Tensor, values: Mapping[str, torch.Tensor], begin: int
    ) -> None:
        """Copy state that the optimizer created or replaced into the chunk."""
        first = max(segment.begin, begin) - begin
        for name, entry in self._inner.state[value].items():
            if per_element(entry):
                values[name][first : first + entry.numel()].copy_(entry)

    def snapshot(self, index: int) -> None:
        """See :class:`Stepper`."""
        super().snapshot(index)
        names = {segment.name for segment in self._ranges[index].segments}
        self._snapshots[index] = (
            {name: self._scalars[name] for name in names},
            {name: self._made[name] for name in names},
        )

    def rollback(self, index: int) -> None:
        """See :class:`Stepper`."""
        scalars, made = self._snapshots[index]
        self._scalars.update(scalars)  # a step replaces these objects and leaves the earlier ones unchanged
        self._made.update(made)
        super().rollback(index)

    def values(self, index: int) -> Iterator[tuple[str, Segment, Values]]:
        """See :class:`Stepper`: what a parameter has since its first step."""
        owned = self._ranges[index]
        for segment in owned.segments:
            if self._made[segment.name]:
                for kind in sorted(self._kinds[segment.group]):
                    yield kind, segment, owned.state.view(kind, segment.begin, segment.end)

    def scalars(self) -> dict[str, Any]:
        """See :class:`Stepper`: the same form as :class:`ElementwiseStepper`'s."""
        return {name: plain_scalars(scalars) for name, scalars in self._scalars.items()}

    def check_scalars(self, state: Mapping[str, Any]) -> None:
        """See :class:`Stepper`."""
        check_saved_scalars(state, self._scalars)

    def load_scalars(self, state: dict[str, Any]) -> None:
        """See :class:`Stepper`."""
        for name in self._scalars:
            self._scalars[name] = live_scalars(state[name])
            self._made[name] = self._made[name] or bool(self._scalars[name])

    def make_state(self, kinds: Mapping[str, tuple[str, ...]]) -> Callable[[], None]:
        """See :class:`Stepper`: buffer for all kinds is there from the start."""
        before = dict(self._made)
        for name, named in kinds.items():
            if name in self._made and any(kind in owned for owned in self._kinds for kind in named):
                self._made[name] = True

        def undo() -> None:
            self._made = before

        return undo


def _fill(state: NvmeState, kind: str, segment: Segment, value: float) -> None:
    for begin, end in state.spans():
        first, last = max(segment.begin, begin), min(segment.end, end)
        if first < last:
            with state.edit(kind, first, last) as values:
                values.fill_(value)


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

    def is_collective(self, index: int) -> bool:
        """See :class:`Stepper`."""
        stepper, local = self._owner[index]
        return stepper.is_collective(local)

    def read_settings(self) -> None:
        """See :class:`Stepper`."""
        for stepper, _ in self._steppers:
            stepper.read_settings()

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

    def unsharded_values(self) -> Iterator[UnshardedState]:
        """See :class:`Stepper`."""
        for stepper, _ in self._steppers:
            yield from stepper.unsharded_values()

    def scalars(self) -> dict[str, Any]:
        """See :class:`Stepper`."""
        return {name: entry for stepper, _ in self._steppers for name, entry in stepper.scalars().items()}

    def check_scalars(self, state: Mapping[str, Any]) -> None:
        """See :class:`Stepper`."""
        for stepper, _ in self._steppers:
            stepper.check_scalars(state)

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
