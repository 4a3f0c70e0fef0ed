"""Muon over shards: momentum where the state is, whole matrices orthogonalized at their owners."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.config.tiers import is_stored
from zero_ext.offload import MASTER, Values, put
from zero_ext.optim.elementwise import plain_scalars
from zero_ext.optim.elementwise_stream import MultiTierStepper
from zero_ext.optim.fused import AdamStepper
from zero_ext.optim.moments import moment_fields
from zero_ext.optim.muon import BUFFER, adjusted_lr, newton_schulz
from zero_ext.optim.muon_groups import serves
from zero_ext.optim.stepper import (
    OwnedRange,
    RangeStepper,
    Segment,
    Stepper,
    StepperInputs,
    Update,
    send_chunk,
    stored_chunks,
)


def make_muon_stepper(inputs: StepperInputs) -> Stepper:
    """Return the stepper of ``zero_ext.Muon``: each range has the parameters of Muon, or those of AdamW."""
    groups = inputs.optimizer.param_groups
    found: dict[bool, list[int]] = {True: [], False: []}
    for index, owned in enumerate(inputs.ranges):
        found[all(serves(groups[segment.group]) for segment in owned.segments)].append(index)

    def over(indices: Sequence[int]) -> StepperInputs:
        return replace(inputs, ranges=[inputs.ranges[index] for index in indices])

    return MultiTierStepper(
        [(MuonStepper(over(found[True])), found[True]), (AdamStepper(over(found[False])), found[False])]
    )


class MuonStepper(RangeStepper):
    """``torch.optim.Muon`` on state in memory, its momentum fp32 or bf16.

    The momentum is averaged where it is, element by element. Directions go to their owners in bf16, which is
    what Newton-Schulz iterates in, and come back as such: nothing is rounded that torch does not round.
    """

    def __init__(self, inputs: StepperInputs) -> None:
        super().__init__(inputs)
        if inputs.whole is None or inputs.total is None:
            raise zero_ext_bug("whole matrices without what makes them")
        self._whole, self._total = inputs.whole, inputs.total
        for owned in self._ranges:
            for kind, field in moment_fields(inputs.moments_dtype, (BUFFER,)).items():
                owned.state.add(kind, field)
        self._group_of = {segment.name: segment.group for owned in self._ranges for segment in owned.segments}

    def step(self, updates: Sequence[Update], scale: torch.Tensor, used: frozenset[str]) -> Iterator[int]:
        """See :class:`Stepper`; a collective. The directions of all ranges exist in bf16 while it runs."""
        directions: dict[int, torch.Tensor] = {}
        stored = [each for each in updates if is_stored(self._ranges[each.index].state.tier)]

        def average() -> torch.Tensor:
            directions.update(self._directions(updates, stored, scale, used))
            return torch.zeros(1, dtype=torch.int64, device="cpu")

        # Storage may fail on one rank alone, which the others would wait for.
        if any(is_stored(owned.state.tier) for owned in self._ranges):
            self._total(average)
        else:
            average()

        def orthogonal(name: str, matrix: torch.Tensor) -> torch.Tensor:
            return newton_schulz(matrix, self._groups[self._group_of[name]])

        by_range = {self._ranges[index]: values for index, values in directions.items()}
        self._whole.apply(by_range, used.intersection(self._group_of), orthogonal)
        for update in updates:
            owned = self._ranges[update.index]
            if not is_stored(owned.state.tier):
                master = owned.state.read(MASTER, 0, owned.state.numel)
                stepped = self._descend(update.index, 0, master, directions, used)
                self._send(owned, master, stepped)
                yield update.index
        with contextlib.closing(stored_chunks(self._staging, self._ranges, stored)) as chunks:
            for chunk in chunks:
                index, master = chunk.state.index, chunk.state.values[MASTER]
                stepped = self._descend(index, chunk.state.begin, master, directions, used)
                chunk.state.changed = True
                send_chunk(self._ranges[index].output, chunk, stepped)
        yield from (each.index for each in stored)

    def _directions(
        self,
        updates: Sequence[Update],
        stored: Sequence[Update],
        scale: torch.Tensor,
        used: frozenset[str],
    ) -> dict[int, torch.Tensor]:
        """Average the momentum of all ranges, and return their directions [n] by index."""
        found: dict[int, torch.Tensor] = {}
        for update in updates:
            owned = self._ranges[update.index]
            device = self._staging.to_tier(owned.state.tier, scale)[0].device
            found[update.index] = torch.zeros(owned.state.numel, dtype=torch.bfloat16, device=device)
            if is_stored(owned.state.tier):
                continue
            for part in self._staging.chunks(owned.state.tier, update.gradient, None):
                buffer = owned.state.read(BUFFER, part.begin, part.end)
                self._average(update.index, part.begin, part.gradient, buffer, scale, used, found)
        with contextlib.closing(stored_chunks(self._staging, self._ranges, stored)) as chunks:
            for chunk in chunks:
                index, buffer = chunk.state.index, chunk.state.values[BUFFER]
                self._average(index, chunk.state.begin, chunk.gradient, buffer, scale, used, found)
                chunk.state.changed = True
        return found

    def _average(
        self,
        index: int,
        begin: int,
        gradient: torch.Tensor,
        buffer: torch.Tensor,
        scale: torch.Tensor,
        used: frozenset[str],
        directions: Mapping[int, torch.Tensor],
    ) -> None:
        """Average ``gradient`` [n] times ``scale`` into ``buffer`` [n], the elements from ``begin`` on."""
        scaled = gradient.to(buffer.device, torch.float32) * scale.to(buffer.device)
        for segment, first, last in self._inside(index, begin, buffer.numel(), used):
            group, own = self._groups[segment.group], scaled[first:last]
            average = buffer[first:last].float().lerp_(own, 1 - group["momentum"])
            buffer[first:last] = average
            direction = own.lerp(average, group["momentum"]) if group["nesterov"] else average
            directions[index][begin + first : begin + last] = direction

    def _descend(
        self,
        index: int,
        begin: int,
        master: torch.Tensor,
        directions: Mapping[int, torch.Tensor],
        used: frozenset[str],
    ) -> list[tuple[int, int]]:
        """Step ``master`` [n], the elements from ``begin`` on, and return those that were stepped."""
        stepped = []
        for segment, first, last in self._inside(index, begin, master.numel(), used):
            group, own = self._groups[segment.group], master[first:last]
            own.mul_(1 - group["lr"] * group["weight_decay"])
            rate = adjusted_lr(group, segment.shape)
            own.add_(directions[index][begin + first : begin + last], alpha=-rate)
            if self._flag is not None:
                self._flag.check(own)
            stepped.append((first, last))
        return stepped

    def _inside(
        self, index: int, begin: int, numel: int, used: frozenset[str]
    ) -> Iterator[tuple[Segment, int, int]]:
        """Yield the used segments among ``numel`` elements from ``begin`` on, with first and last element
        counted from there."""
        for segment in self._ranges[index].segments:
            first, last = max(segment.begin - begin, 0), min(segment.end - begin, numel)
            if segment.name in used and first < last:
                yield segment, first, last

    def _send(self, owned: OwnedRange, master: torch.Tensor, stepped: Sequence[tuple[int, int]]) -> None:
        if owned.output is None:
            return
        if is_stored(owned.output.tier):
            self._staging.send(master, owned.output, owned.state.tier)
            return
        for first, last in stepped:
            put(owned.output, first, master[first:last], owned.state.tier)

    def values(self, index: int) -> Iterator[tuple[str, Segment, Values]]:
        """See :class:`Stepper`: the momentum."""
        owned = self._ranges[index]
        for segment in owned.segments:
            yield BUFFER, segment, owned.state.view(BUFFER, segment.begin, segment.end)

    def scalars(self) -> dict[str, Any]:
        """See :class:`Stepper`: there are none, in the form that the element-wise steppers give them."""
        return {name: plain_scalars({}) for name in self._group_of}

    def load_scalars(self, state: dict[str, Any]) -> None:
        """See :class:`Stepper`."""
