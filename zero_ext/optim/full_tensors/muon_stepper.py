"""Muon over shards: momentum where the state is, whole matrices orthogonalized at their owners."""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from types import SimpleNamespace
from typing import Any

import torch

from zero_ext.config.full_tensor_costs import BATCH_ELEMENTS, WAVE_ELEMENTS, WAVES_IN_FLIGHT
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.config.tiers import is_stored
from zero_ext.offload import MASTER, Values
from zero_ext.optim.elementwise import plain_scalars
from zero_ext.optim.elementwise_stream import MultiTierStepper
from zero_ext.optim.full_tensors.muon import BUFFER, adjusted_lr, as_matrices, newton_schulz
from zero_ext.optim.full_tensors.muon_groups import check_rules, direction_dtype, read_settings, serves
from zero_ext.optim.fused import AdamStepper
from zero_ext.optim.moments import moment_fields
from zero_ext.optim.stepper import (
    PendingTransform,
    RangeStepper,
    Segment,
    StepperInputs,
    StoredChunk,
    Update,
    send_chunk,
    send_parameters,
    stored_chunks,
)


class MuonAndAdamWStepper(MultiTierStepper):
    """The steps of ``zero_ext.Muon`` and ``torch.optim.Muon``: a range has parameters of Muon or of AdamW.

    Both read settings that :meth:`read_settings` has checked and copied. A setting on a device is waited for
    there, once, and not for every matrix.
    """

    def __init__(self, inputs: StepperInputs) -> None:
        self._live = inputs.optimizer.param_groups
        self._rules = [serves(group) for group in self._live]
        self._settings = read_settings(self._live)
        found: dict[bool, list[int]] = {True: [], False: []}
        for index, owned in enumerate(inputs.ranges):
            found[all(self._rules[segment.group] for segment in owned.segments)].append(index)
        optimizer = SimpleNamespace(param_groups=self._settings)

        def over(rule: bool) -> StepperInputs:
            return replace(
                inputs, optimizer=optimizer, ranges=[inputs.ranges[index] for index in found[rule]]
            )

        super().__init__([(MuonStepper(over(True)), found[True]), (AdamStepper(over(False)), found[False])])

    def read_settings(self) -> None:
        """See :class:`Stepper`."""
        settings = read_settings(self._live)
        check_rules(settings, self._rules)
        for own, read in zip(self._settings, settings, strict=True):
            own.update(read)


@dataclass
class _Wave:
    """Ranges that are stepped in one exchange, and their directions [n] by index."""

    updates: Sequence[Update]
    directions: dict[int, torch.Tensor] = dataclass_field(default_factory=dict)
    pending: PendingTransform = dataclass_field(init=False)  # once the directions are under way


class MuonStepper(RangeStepper):
    """``torch.optim.Muon`` on state in any tier, its momentum fp32 or bf16.

    The momentum is averaged where it is, element by element. Directions go to their owners in the dtype that
    Newton-Schulz iterates in, and come back as such: nothing is rounded that torch does not round.
    """

    def __init__(self, inputs: StepperInputs) -> None:
        super().__init__(inputs)
        if inputs.exchange is None or inputs.total is None:
            raise zero_ext_bug("whole matrices without what makes them")
        self._exchange, self._total = inputs.exchange, inputs.total
        for owned in self._ranges:
            for kind, field in moment_fields(inputs.moments_dtype, (BUFFER,)).items():
                owned.state.add(kind, field)
        self._group_of = {segment.name: segment.group for owned in self._ranges for segment in owned.segments}

    def is_collective(self, index: int) -> bool:
        """See :class:`Stepper`."""
        return True

    def step(self, updates: Sequence[Update], scale: torch.Tensor, used: frozenset[str]) -> Iterator[int]:
        """See :class:`Stepper`; a collective.

        Ranges go in waves, which bound the memory of directions. While the matrices of one wave are
        orthogonalized, directions of the next one travel and results of the one before. So a rank that has
        more to do in one wave may catch up in others.
        """
        flying: deque[_Wave] = deque()
        for wave in self._waves(updates):
            landed = [flying.popleft()] if len(flying) == WAVES_IN_FLIGHT else []
            self._read_and_write(landed, wave, scale, used)
            for each in landed:
                yield from (update.index for update in each.updates)
            device = self._staging.torch_device("host" if self._exchange.in_host_memory else "device")
            wave.directions = {index: values.to(device) for index, values in wave.directions.items()}
            values = {self._ranges[index]: values for index, values in wave.directions.items()}
            wave.pending = self._exchange.start(values, used.intersection(self._group_of))
            flying.append(wave)
            if len(flying) > 1:
                self._orthogonalize(flying[-2])
        if flying:
            self._orthogonalize(flying[-1])
        for wave in flying:
            self._descend_wave(wave, used)
            yield from (update.index for update in wave.updates)

    def _waves(self, updates: Sequence[Update]) -> Iterator[_Wave]:
        """Yield the updates in order, as many as have ``WAVE_ELEMENTS`` in sum, more where a tensor has
        slices in several ranges. All ranks have the same waves, as their shards are of one size."""
        indices = {self._ranges[update.index]: update.index for update in updates}
        wave: list[Update] = []
        elements, missing = 0, set[int]()
        for update in updates:
            owned = self._ranges[update.index]
            if wave and not missing and elements + owned.state.numel > WAVE_ELEMENTS:
                yield _Wave(wave)
                wave, elements = [], 0
            missing.update(indices[each] for each in self._exchange.related(owned) if each in indices)
            wave.append(update)
            missing.difference_update(each.index for each in wave)
            elements += owned.state.numel
        if wave:
            yield _Wave(wave)

    def _read_and_write(
        self, landed: Sequence[_Wave], wave: _Wave, scale: torch.Tensor, used: frozenset[str]
    ) -> None:
        def move() -> None:
            for each in landed:
                self._descend_wave(each, used)
            self._average_wave(wave, scale, used)

        self._on_all_ranks(move)

    def _orthogonalize(self, wave: _Wave) -> None:
        self._on_all_ranks(lambda: wave.pending.apply(self._orthogonal))
        wave.pending.send_results()

    def _on_all_ranks(self, action: Callable[[], None]) -> None:
        """Run ``action`` and raise its error on all ranks: in the exchange they would wait for a rank that is
        out of memory or cannot read its storage."""

        def run() -> torch.Tensor:
            action()
            return torch.empty(0, dtype=torch.int64, device="cpu")

        self._total(run, fallible=True)

    def _orthogonal(self, matrices: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the orthogonal factors of ``matrices`` by name. They are computed on the device that trains,
        wherever the state is, and on a GPU in batches of one shape."""
        device = self._staging.torch_device("device")
        alike: dict[tuple[int, torch.Size], list[str]] = defaultdict(list)
        for name, matrix in matrices.items():
            alike[self._group_of[name], matrix.shape].append(name)
        found: dict[str, torch.Tensor] = {}
        for (group, shape), names in alike.items():
            alone = device.type == "cpu"  # where a batch is computed matrix by matrix
            count = 1 if alone else max(1, BATCH_ELEMENTS // max(1, shape.numel()))
            for first in range(0, len(names), count):
                batch = names[first : first + count]
                stack = torch.stack([as_matrices(matrices[name]) for name in batch])
                results = newton_schulz(stack.to(device), self._groups[group]).to(stack.device)
                results = results.reshape(-1, *shape)
                found.update(zip(batch, results, strict=True))
        return found

    def _average_wave(self, wave: _Wave, scale: torch.Tensor, used: frozenset[str]) -> None:
        """Average the momentum of all ranges, and write their directions."""
        dtype = direction_dtype(self._groups)
        for update in wave.updates:
            owned = self._ranges[update.index]
            device = self._staging.torch_device(owned.state.tier)
            directions = torch.zeros(owned.state.numel, dtype=dtype, device=device)
            wave.directions[update.index] = directions
            if is_stored(owned.state.tier):
                continue
            for step_chunk in self._staging.chunks(owned.state.tier, update.gradient, None):
                begin, gradient = step_chunk.begin, step_chunk.gradient
                buffer = owned.state.read(BUFFER, begin, step_chunk.end)
                self._average(update.index, begin, gradient, buffer, scale, used, directions)
        with contextlib.closing(self._stored_chunks(wave, BUFFER)) as chunks:
            for chunk in chunks:
                index, buffer = chunk.state.index, chunk.state.values[BUFFER]
                self._average(
                    index, chunk.state.begin, chunk.gradient, buffer, scale, used, wave.directions[index]
                )
                chunk.state.changed = True

    def _descend_wave(self, wave: _Wave, used: frozenset[str]) -> None:
        """Step the master weights by the directions that came back, and send them to the parameters."""
        wave.pending.finish()
        for index, directions in wave.directions.items():
            wave.directions[index] = directions.to(self._staging.torch_device(self._ranges[index].state.tier))
        for update in wave.updates:
            owned = self._ranges[update.index]
            if not is_stored(owned.state.tier):
                master = owned.state.read(MASTER, 0, owned.state.numel)
                stepped = self._descend(update.index, 0, master, wave.directions, used)
                send_parameters(self._staging, owned, stepped)
        with contextlib.closing(self._stored_chunks(wave, MASTER)) as chunks:
            for chunk in chunks:
                index, master = chunk.state.index, chunk.state.values[MASTER]
                stepped = self._descend(index, chunk.state.begin, master, wave.directions, used)
                chunk.state.changed = True
                send_chunk(self._ranges[index].output, chunk, stepped)

    def _stored_chunks(self, wave: _Wave, kind: str) -> Generator[StoredChunk]:
        stored = [each for each in wave.updates if is_stored(self._ranges[each.index].state.tier)]
        return stored_chunks(self._staging, self._ranges, stored, kind)

    def _average(
        self,
        index: int,
        begin: int,
        gradient: torch.Tensor,
        buffer: torch.Tensor,
        scale: torch.Tensor,
        used: frozenset[str],
        directions: torch.Tensor,
    ) -> None:
        """Average ``gradient`` [n] times ``scale`` into ``buffer`` [n], the elements from ``begin`` on."""
        scaled = gradient.to(buffer.device, torch.float32) * scale.to(buffer.device)
        for segment, first, last in self._inside(index, begin, buffer.numel(), used):
            group, own = self._groups[segment.group], scaled[first:last]
            stored = buffer[first:last]
            average = stored.float().lerp_(own, 1 - group["momentum"])
            if stored.dtype != average.dtype:  # else it is the same memory
                stored.copy_(average)
            direction = own.lerp(average, group["momentum"]) if group["nesterov"] else average
            directions[begin + first : begin + last] = direction

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
