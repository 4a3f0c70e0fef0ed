"""LAMB (You et al., arXiv 1904.00962) over owned ranges: norms of all layers, one sum over the ranks, the"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from zero_ext import ops
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.config.tiers import Tier, is_stored
from zero_ext.offload import MASTER
from zero_ext.optim.fused import FusedStepper, inside
from zero_ext.optim.fused_optimizers import lamb_row, trust_ratio
from zero_ext.optim.moments import MOMENTS, FloatMoments
from zero_ext.optim.stepper import (
    CountingStepper,
    OwnedRange,
    Segment,
    StepperInputs,
    StoredChunk,
    Update,
    send_chunk,
    stored_chunks,
)

_Buffers = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # [n] each: masters to gradient


class _NormEntry(NamedTuple):
    """A parameter in the step's table of norms, and its hyper-parameters."""

    number: int
    row: list[float]


class _Norms:
    """Sums of squares [parameters, 2, 33] of weights and of updates; each device adds up what it holds."""

    def __init__(self, parameters: int) -> None:
        self._shape = (parameters, 2, ops.ACCUMULATOR_ENTRIES)
        self._tables: dict[torch.device, torch.Tensor] = {}

    def add(self, numbers: torch.Tensor, norms: torch.Tensor) -> None:
        """Add ``norms`` [n, 2, 33] to those of the parameters ``numbers`` [n]."""
        if norms.device not in self._tables:
            self._tables[norms.device] = torch.zeros(self._shape, dtype=torch.int64, device=norms.device)
        self._tables[norms.device].index_add_(0, numbers, norms)

    def total(self) -> torch.Tensor:
        """Return all of it in host memory; wait for the devices."""
        total = torch.zeros(self._shape, dtype=torch.int64, device="cpu")
        for table in self._tables.values():
            total += table.cpu()
        return total


class LambStepper(CountingStepper, FusedStepper):
    """LAMB on state in memory and on NVMe, its moments fp32 or bf16. State is read twice per step: for the
    norms, summed exactly over all ranks by ``total``, and for the step, which writes it.

    The norms are those of whole parameters, whatever ranges these are cut into.
    """

    reads_scale_on_device = False

    def __init__(self, inputs: StepperInputs) -> None:
        super().__init__(inputs, FloatMoments(inputs.ranges, inputs.moments_dtype, ops.lamb_step_))
        if inputs.total is None:
            raise zero_ext_bug("norms of all ranks without their sum")
        self._total = inputs.total
        self._ratios: dict[str, float] = {}

    def step(self, updates: Sequence[Update], scale: torch.Tensor, used: frozenset[str]) -> Iterator[int]:
        """See :class:`Stepper`; a collective, before anything changes. Gradients may be fp32, bf16 or
        fp16."""
        stepped = {
            segment.name: segment
            for update in updates
            for segment in self._ranges[update.index].segments
            if segment.name in used
        }
        for name in stepped:
            self._steps[name] += 1
        self._ratios = dict.fromkeys(stepped, 1.0)
        norms = self._total(lambda: self._own_norms(updates, scale, stepped))
        for (name, segment), each in zip(stepped.items(), norms, strict=True):
            self._ratios[name] = trust_ratio(self._groups[segment.group], each)
        in_memory, stored = self._split(updates)
        yield from super().step(in_memory, scale, used)
        yield from self._step_stored(stored, scale, used)

    def _hyper_parameters(self, segment: Segment) -> list[float]:
        name = segment.name
        return lamb_row(self._groups[segment.group], self._steps[name], self._ratios[name])

    def _split(self, updates: Sequence[Update]) -> tuple[list[Update], list[Update]]:
        """Return those of state in memory, and those of state in storage."""
        stored = [each for each in updates if is_stored(self._ranges[each.index].state.tier)]
        return [each for each in updates if each not in stored], stored

    def _own_norms(
        self, updates: Sequence[Update], scale: torch.Tensor, stepped: dict[str, Segment]
    ) -> torch.Tensor:
        norms = _Norms(len(stepped))
        numbers = {name: number for number, name in enumerate(stepped)}
        entries = {update.index: self._entries(self._ranges[update.index], numbers) for update in updates}
        in_memory, stored = self._split(updates)
        for update in in_memory:
            state = self._ranges[update.index].state
            for staged in self._staging.chunks(state.tier, update.gradient, None):
                master, exp_avg, exp_avg_sq = state.read_kinds((MASTER, *MOMENTS), staged.begin, staged.end)
                buffers = (master, exp_avg, exp_avg_sq, staged.gradient)
                found = inside(staged.begin, staged.end, *entries[update.index])
                self._add_norms(norms, state.tier, buffers, found, scale)
        with contextlib.closing(stored_chunks(self._staging, self._ranges, stored)) as chunks:
            for chunk in chunks:
                found = inside(chunk.state.begin, chunk.state.end, *entries[chunk.state.index])
                self._add_norms(norms, "host", _buffers(chunk), found, scale)
        return norms.total()

    def _entries(
        self, owned: OwnedRange, numbers: dict[str, int]
    ) -> tuple[list[tuple[int, int]], list[_NormEntry]]:
        """Return the element ranges to step, one per parameter, and the entry of each."""
        bounds, entries = [], []
        for segment in owned.segments:
            if segment.name in numbers and segment.numel:
                bounds.append((segment.begin, segment.end))
                entries.append(_NormEntry(numbers[segment.name], self._hyper_parameters(segment)))
        return bounds, entries

    def _add_norms(
        self,
        norms: _Norms,
        tier: Tier,
        buffers: _Buffers,
        found: tuple[list[tuple[int, int]], list[_NormEntry]],
        scale: torch.Tensor,
    ) -> None:
        bounds, entries = found
        if not bounds:
            return
        segments, hyper, factor, numbers = self._staging.to_tier(
            tier,
            torch.tensor(bounds, dtype=torch.int64, device="cpu"),
            torch.tensor([entry.row for entry in entries], dtype=torch.float64, device="cpu"),
            scale,
            torch.tensor([entry.number for entry in entries], dtype=torch.int64, device="cpu"),
        )
        squares = torch.zeros(
            len(bounds), 2, ops.ACCUMULATOR_ENTRIES, dtype=torch.int64, device=segments.device
        )
        ops.lamb_norms_(*buffers, segments, hyper, factor, squares)
        norms.add(numbers, squares)

    def _step_stored(
        self, stored: Sequence[Update], scale: torch.Tensor, used: frozenset[str]
    ) -> Iterator[int]:
        settings = {update.index: self._rows(update, used) for update in stored}
        with contextlib.closing(stored_chunks(self._staging, self._ranges, stored)) as chunks:
            for chunk in chunks:
                state = chunk.state
                bounds, rows = inside(state.begin, state.end, *settings[state.index])
                if not bounds:
                    continue
                ops.lamb_step_(
                    *_buffers(chunk),
                    None,
                    torch.tensor(bounds, dtype=torch.int64, device="cpu"),
                    torch.tensor(rows, dtype=torch.float64, device="cpu"),
                    scale,
                    self._host_flag(),
                )
                state.changed = True
                send_chunk(self._ranges[state.index].output, chunk, bounds)
        yield from settings


def _buffers(chunk: StoredChunk) -> _Buffers:
    """Return master weights, moments and gradient in host memory."""
    gradient, near = chunk.gradient, chunk.staging.gradient
    if gradient.device != near.device:
        gradient = near[: gradient.numel()].copy_(gradient)
    master, exp_avg, exp_avg_sq = (chunk.state.values[kind] for kind in (MASTER, *MOMENTS))
    return master, exp_avg, exp_avg_sq, gradient
