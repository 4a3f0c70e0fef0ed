"""Optimizers in one pass over flat shards: Adam and AdamW (Kingma & Ba 2015; Loshchilov & Hutter 2019), Lion
(Chen et al. 2023)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch

from zero_ext import ops
from zero_ext.config.tiers import Tier, is_stored
from zero_ext.offload import (
    MASTER,
    AdamWork,
    MemoryShard,
    NvmeState,
    ShardStorage,
    StepChunk,
    TransferStats,
    Values,
    stream_adam,
)
from zero_ext.optim.elementwise import plain_scalars
from zero_ext.optim.fused_optimizers import Lion, lion_row
from zero_ext.optim.moments import EightBitMoments, FloatMoments, Moments
from zero_ext.optim.stepper import (
    CountingStepper,
    NonFiniteFlag,
    RangeStepper,
    Segment,
    StepperInputs,
    Update,
    flag_on,
    segments_to_step,
)

Row = TypeVar("Row")


class FusedStepper(RangeStepper, ABC):
    """A fused optimizer over owned ranges in memory: unscale, clip, update, cast to compute precision in one
    pass of memory.
    """

    def __init__(self, inputs: StepperInputs, moments: Moments) -> None:
        super().__init__(inputs)
        self._moments = moments

    @property
    def reads_scale_on_device(self) -> bool:
        """See :class:`Stepper`: where state and parameters are all on the device.

        Values in staging memory are sent on even if a kernel did not write them.
        """
        return all(
            owned.state.tier == "device" and (owned.output is None or owned.output.tier == "device")
            for owned in self._ranges
        )

    def watch(self, flag: NonFiniteFlag) -> None:
        """Raise ``flag`` for results that are not finite. See :meth:`Stepper.watch`."""
        self._flag = self._moments.flag = flag

    def step(self, updates: Sequence[Update], scale: torch.Tensor, used: frozenset[str]) -> Iterator[int]:
        """See :class:`Stepper`. Gradients may be fp32, bf16 or fp16."""
        for number, update in enumerate(updates):
            owned = self._ranges[update.index]
            bounds, rows = self._rows(update, used)
            output, tier = owned.output, owned.state.tier
            then = self._near_range(updates[number + 1 : number + 2], tier)
            for chunk in self._staging.chunks(tier, update.gradient, output, then=then):
                self._step_chunk(update.index, chunk, bounds, rows, scale)
            yield update.index

    def _near_range(
        self, following: Sequence[Update], tier: Tier
    ) -> tuple[ShardStorage, ShardStorage | None] | None:
        """Gradient and output of the range that comes next, if its state is in memory of ``tier``."""
        for update in following:
            if self._ranges[update.index].state.tier == tier:
                return update.gradient, self._ranges[update.index].output
        return None

    def _rows(self, update: Update, used: frozenset[str]) -> tuple[list[tuple[int, int]], list[list[float]]]:
        """Element ranges to step and the hyper-parameters of each."""
        bounds: list[tuple[int, int]] = []
        rows: list[list[float]] = []
        for segment in segments_to_step(self._ranges[update.index].segments, used, update.ranges):
            if not segment.numel:
                continue
            row = self._hyper_parameters(segment)
            begin, end = segment.begin, segment.end
            if rows and rows[-1] == row and bounds[-1][1] == begin:
                bounds[-1] = (bounds[-1][0], end)
            else:
                bounds.append((begin, end))
                rows.append(row)
        return bounds, rows

    def _step_chunk(
        self,
        index: int,
        chunk: StepChunk,
        bounds: list[tuple[int, int]],
        rows: list[list[float]],
        scale: torch.Tensor,
    ) -> None:
        covers, inner_rows = inside(chunk.begin, chunk.end, bounds, rows)
        covered = sum(end - begin for begin, end in covers)
        if not covered:
            chunk.sent.append((0, 0))
        elif chunk.staged is not None and covered < chunk.end - chunk.begin:
            # All of it is written back, so elements that the step skips need their current value.
            chunk.staged.copy_(self._ranges[index].state.read(MASTER, chunk.begin, chunk.end))
        if inner_rows:
            segments = torch.tensor(covers, dtype=torch.int64, device="cpu")
            hyper = torch.tensor(inner_rows, dtype=torch.float64, device="cpu")
            tier = self._ranges[index].state.tier
            self._moments.update(index, chunk, *self._staging.to_tier(tier, segments, hyper, scale))

    def _host_flag(self) -> torch.Tensor | None:
        return flag_on(self._flag, torch.device("cpu"))

    @abstractmethod
    def _hyper_parameters(self, segment: Segment) -> list[float]:
        """Return a row of ``hyper`` as the op takes it."""

    def values(self, index: int) -> Iterator[tuple[str, Segment, Values]]:
        """See :class:`Stepper`: the moments."""
        return self._moments.values(index)

    @abstractmethod
    def scalars(self) -> dict[str, Any]:
        """See :class:`Stepper`."""

    @abstractmethod
    def load_scalars(self, state: dict[str, Any]) -> None:
        """See :class:`Stepper`."""


class AdamStepper(CountingStepper, FusedStepper):
    """Adam and AdamW, on state in memory and on NVMe. Moments are fp32, bf16 or "8bit"."""

    def __init__(self, inputs: StepperInputs) -> None:
        ranges, dtype = inputs.ranges, inputs.moments_dtype
        super().__init__(inputs, EightBitMoments(ranges) if dtype == "8bit" else FloatMoments(ranges, dtype))

    def step(self, updates: Sequence[Update], scale: torch.Tensor, used: frozenset[str]) -> Iterator[int]:
        """See :class:`Stepper`. Gradients may be fp32, bf16 or fp16."""
        in_memory = [each for each in updates if not is_stored(self._ranges[each.index].state.tier)]
        yield from super().step(in_memory, scale, used)
        stored: list[AdamWork] = []
        in_storage: list[int] = []
        for update in updates:
            owned = self._ranges[update.index]
            if not isinstance(owned.state, NvmeState):
                continue
            in_storage.append(update.index)
            gradient, output, rows = update.gradient, owned.output, self._rows(update, used)
            if self._staging.can_access(gradient, "host") and self._staging.can_access(output, "host"):
                stored.append(AdamWork(owned.state.extent(0, owned.state.numel), gradient, output, *rows))
            else:
                self._step_far(owned.state, gradient, output, rows, scale)
        if stored:
            # All ranges in one pipeline: between two of them nothing has to drain.
            stream_adam(stored, scale, self._host_flag())
        yield from in_storage

    def _rows(self, update: Update, used: frozenset[str]) -> tuple[list[tuple[int, int]], list[list[float]]]:
        # Also of a parameter without an element to step here, so that all ranks count alike.
        segments = self._ranges[update.index].segments
        for name in {segment.name for segment in segments if segment.name in used}:
            self._steps[name] += 1
        return super()._rows(update, used)

    def _step_far(
        self,
        state: NvmeState,
        gradient: ShardStorage,
        output: ShardStorage | None,
        settings: tuple[list[tuple[int, int]], list[list[float]]],
        scale: torch.Tensor,
    ) -> None:
        """Step a range with state that streams through the host, which does not reach its gradient or its
        parameters: these are copied in chunks."""
        accessible = self._staging.can_access(gradient, "host")
        near_output = output if self._staging.can_access(output, "host") else None
        # Where the gradient is read by the step itself, values that take no memory stand for it.
        brought = _in_host(torch.zeros(1, device="cpu").expand(gradient.numel)) if accessible else gradient
        far_output = None if near_output is output else output
        for chunk in self._staging.chunks("host", brought, far_output, state.stream.chunk_elements):
            span, (bounds, rows) = (chunk.begin, chunk.end), inside(chunk.begin, chunk.end, *settings)
            source = gradient.subrange(*span) if accessible else _in_host(chunk.gradient)
            target = near_output.subrange(*span) if near_output is not None else None
            if chunk.staged is not None:
                target = _in_host(chunk.staged)
            work = AdamWork(state.extent(*span), source, target, bounds, rows)
            stream_adam([work], scale, self._host_flag())
            chunk.sent.extend(bounds or [(0, 0)])

    def _hyper_parameters(self, segment: Segment) -> list[float]:
        group = self._groups[segment.group]
        beta1, beta2 = group["betas"]
        decoupled = group.get("decoupled_weight_decay", False)
        return [
            float(group["lr"]),
            float(beta1),
            float(beta2),
            float(group["eps"]),
            float(group["weight_decay"]),
            float(self._steps[segment.name]),
            float(bool(decoupled)),
            float(bool(group["maximize"])),
        ]


class LionStepper(FusedStepper):
    """Lion on state in memory, its moment fp32 or bf16."""

    def __init__(self, inputs: StepperInputs) -> None:
        moments = FloatMoments(inputs.ranges, inputs.moments_dtype, ops.lion_step_, Lion.MOMENTS)
        super().__init__(inputs, moments)

    def _hyper_parameters(self, segment: Segment) -> list[float]:
        return lion_row(self._groups[segment.group])

    def scalars(self) -> dict[str, Any]:
        """See :class:`Stepper`: there are none, in the form that the element-wise steppers give them."""
        return {segment.name: plain_scalars({}) for owned in self._ranges for segment in owned.segments}

    def load_scalars(self, state: dict[str, Any]) -> None:
        """See :class:`Stepper`."""


def inside(
    first: int, last: int, bounds: Sequence[tuple[int, int]], rows: Sequence[Row]
) -> tuple[list[tuple[int, int]], list[Row]]:
    """Return the element ranges ``bounds`` within [first, last), counted from ``first``, and the row
    of each.
    """
    found = [
        ((max(begin, first) - first, min(end, last) - first), row)
        for (begin, end), row in zip(bounds, rows, strict=True)
        if begin < last and first < end
    ]
    return [bound for bound, _ in found], [row for _, row in found]


def _in_host(memory: torch.Tensor) -> ShardStorage:
    """Return host memory as the storage of a shard that is never copied."""
    return MemoryShard("host", memory, TransferStats())
