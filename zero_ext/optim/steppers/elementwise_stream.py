"""torch's own element-wise optimizers on state that is stored on NVMe, one chunk at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zero_ext.config import Tier
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.offload import MASTER, NvmeState, StateChunk, StepStaging, Values, visit_chunks
from zero_ext.optim.elementwise_check import (
    elementwise_kinds,
    initial_state,
    live_scalars,
    on_other_tensors,
    per_element,
    plain_scalars,
)
from zero_ext.optim.steppers.non_finite_flag import NonFiniteFlag
from zero_ext.optim.steppers.param_writeback import send_chunk
from zero_ext.optim.steppers.stepper import OwnedRange, Segment, Update


class ElementwiseStream:
    """Runs a copy of the user's optimizer over chunks of fp32 master segments; the next chunk is read and the
    last one written meanwhile. Scalar state (step counts, averages' coefficients) stays in memory, one set a
    parameter.
    """

    reads_scale_on_device = False

    def __init__(
        self, optimizer: torch.optim.Optimizer, ranges: Sequence[OwnedRange], staging: StepStaging
    ) -> None:
        self._groups = optimizer.param_groups
        self._inner = on_other_tensors(optimizer, [])
        self._ranges = tuple(ranges)
        self._staging = staging
        self._kinds = [elementwise_kinds(optimizer, group) for group in self._groups]
        self._scalars: dict[str, dict[str, Any]] = {}
        self._snapshots: dict[int, tuple[dict[str, dict[str, Any]], dict[str, bool]]] = {}
        self._made: dict[str, bool] = {}  # whether a parameter's state exists: from its first step on
        self._stream = _stored(ranges[0]).stream
        self._flag: NonFiniteFlag | None = None
        for owned in ranges:
            for segment in owned.segments:
                state = initial_state(optimizer, torch.zeros(1, device="cpu"), self._groups[segment.group])
                self._scalars[segment.name] = {
                    name: entry for name, entry in state.items() if not per_element(entry)
                }
                self._made[segment.name] = bool(state)
                for name, entry in state.items():
                    if per_element(entry) and entry[0] != 0:  # storage is zero from the start
                        _fill(_stored(owned), name, segment, float(entry[0]))

    def watch(self, flag: NonFiniteFlag) -> None:
        """Raise ``flag`` for master weights that are not finite after a step. See :meth:`Stepper.watch`."""
        self._flag = flag

    def step(self, updates: Sequence[Update], scale: torch.Tensor, used: frozenset[str]) -> Iterator[int]:
        """See :class:`Stepper`; the gradient of one chunk exists in fp32 while it runs."""
        gradients = {update.index: update.gradient for update in updates}
        states = [(update.index, _stored(self._ranges[update.index])) for update in updates]
        after: dict[str, dict[str, Any]] = {}
        staging = self._staging.state_chunk_buffers(self._stream.chunk_bytes, self._stream.chunk_elements)
        with contextlib.closing(visit_chunks(self._stream, states, staging.buffers)) as chunks:
            for chunk in chunks:
                shard = gradients[chunk.index]
                near: Tier = "host" if shard.tier == "nvme" else shard.tier
                brought = self._staging.fetch_gradient(shard, chunk.begin, chunk.end, near)
                if brought.device != staging.gradient.device:
                    self._stream.transfers.record("device", "host", brought.nbytes)
                gradient = staging.gradient[: chunk.end - chunk.begin].copy_(brought).mul_(scale)
                after.update(self._step_chunk(chunk, gradient, used, staging.output))
        for name, scalars in after.items():
            self._scalars[name], self._made[name] = scalars, True
        yield from gradients

    def _step_chunk(
        self, chunk: StateChunk, gradient: torch.Tensor, used: frozenset[str], buffer: torch.Tensor
    ) -> dict[str, dict[str, Any]]:
        """Step one chunk and return the scalars that its parameters have afterwards.

        ``buffer`` holds its parameters while they are sent to storage.
        """
        owned, values = self._ranges[chunk.index], chunk.values
        begin, end = chunk.begin, chunk.end
        groups: list[dict[str, Any]] = [{**group, "params": []} for group in self._groups]
        stepped: list[tuple[Segment, torch.Tensor]] = []
        for segment in owned.segments:
            first, last = max(segment.begin, begin), min(segment.end, end)
            # A rank without elements of a parameter steps an empty one, to have its scalars.
            empty = segment.numel == 0 and begin == 0
            if segment.name not in used or (first >= last and not empty):
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
        spans = []
        for segment, value in stepped:
            first = max(segment.begin, begin) - begin
            spans.append((first, first + value.numel()))
        send_chunk(owned.output, begin, values[MASTER], spans, buffer)
        found = {segment.name: self._scalars_of(value) for segment, value in stepped}
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

    def _scalars_of(self, value: torch.Tensor) -> dict[str, Any]:
        return {name: entry for name, entry in self._inner.state[value].items() if not per_element(entry)}

    def snapshot(self, index: int) -> None:
        """See :class:`Stepper`."""
        owned = self._ranges[index]
        owned.state.snapshot()
        names = {segment.name for segment in owned.segments}
        self._snapshots[index] = (
            {name: self._scalars[name] for name in names},
            {name: self._made[name] for name in names},
        )

    def commit(self, index: int) -> None:
        """See :class:`Stepper`."""
        self._ranges[index].state.commit()

    def rollback(self, index: int) -> None:
        """See :class:`Stepper`."""
        scalars, made = self._snapshots[index]
        self._scalars.update(scalars)  # a step replaces these objects and leaves the earlier ones unchanged
        self._made.update(made)
        self._ranges[index].state.rollback()

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

    def state_bytes(self) -> Mapping[Tier, int]:
        """See :class:`Stepper`: none."""
        return {}


def _stored(owned: OwnedRange) -> NvmeState:
    if not isinstance(owned.state, NvmeState):
        raise zero_ext_bug(f"state in tier '{owned.state.tier}' does not stream")
    return owned.state


def _fill(state: NvmeState, kind: str, segment: Segment, value: float) -> None:
    for begin, end in state.spans():
        first, last = max(segment.begin, begin), min(segment.end, end)
        if first < last:
            with state.edit(kind, first, last) as values:
                values.fill_(value)
