"""Storage and precision of moments: floats alongside the masters, or Adam's in 8-bit blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Protocol

import torch

from zero_ext import ops
from zero_ext.offload import MASTER, StateField, StepChunk, Values
from zero_ext.optim.steppers.dequantized_state import DequantizedState, codes_of, scales_of
from zero_ext.optim.steppers.non_finite_flag import NonFiniteFlag, flag_on
from zero_ext.optim.steppers.stepper import OwnedRange, Segment

MOMENTS = ("exp_avg", "exp_avg_sq")
LION_MOMENTS = ("exp_avg",)
_SIGNED = (True, False)
MomentsDtype = torch.dtype | Literal["8bit"]
_BY_NAME: dict[str, MomentsDtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": "8bit"}


def moments_dtype_named(name: str) -> MomentsDtype:
    """Return what the configuration's `precision.moments_dtype` names."""
    return _BY_NAME[name]


def moment_fields(dtype: MomentsDtype) -> dict[str, StateField]:
    """Return the state that Adam's moments of ``dtype`` take, in the order of ``ops.ADAM_FIELDS``."""
    if isinstance(dtype, torch.dtype):
        return dict.fromkeys(MOMENTS, StateField(dtype))
    scales = dict.fromkeys(map(scales_of, MOMENTS), StateField(torch.float32, ops.BLOCK_ELEMENTS))
    return {**scales, **dict.fromkeys(map(codes_of, MOMENTS), StateField(torch.uint8))}


class Moments(Protocol):
    """The moments of every owned range; zeros at first. ``index`` counts the ranges. Updates raise ``flag``,
    if there is one, where a result is not finite."""

    flag: NonFiniteFlag | None

    def update(
        self, index: int, chunk: StepChunk, segments: torch.Tensor, hyper: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """Step one chunk of a range.

        ``segments``, ``hyper`` and ``scale`` are the arguments of its op, on the device where it reads them.
        """

    def values(self, index: int) -> Iterator[tuple[str, Segment, Values]]:
        """See :class:`Stepper`."""


class FloatMoments:
    """Adam's moments in fp32 or bf16, as state of the ranges."""

    KINDS: tuple[str, ...] = MOMENTS
    flag: NonFiniteFlag | None = None

    def __init__(self, ranges: Sequence[OwnedRange], dtype: torch.dtype) -> None:
        self._ranges = tuple(ranges)
        _add_state(ranges, dict.fromkeys(self.KINDS, StateField(dtype)))

    def update(
        self, index: int, chunk: StepChunk, segments: torch.Tensor, hyper: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """See :class:`Moments`."""
        state = self._ranges[index].state
        master, exp_avg, exp_avg_sq = state.read_kinds((MASTER, *MOMENTS), chunk.begin, chunk.end)
        buffers = (master, exp_avg, exp_avg_sq, chunk.gradient, chunk.output)
        ops.adam_step_(*buffers, segments, hyper, scale, flag_on(self.flag, master.device))

    def values(self, index: int) -> Iterator[tuple[str, Segment, Values]]:
        """See :class:`Moments`."""
        owned = self._ranges[index]
        for kind in self.KINDS:
            for segment in owned.segments:
                yield kind, segment, owned.state.view(kind, segment.begin, segment.end)


class LionMoments(FloatMoments):
    """Lion's moment in fp32 or bf16, as state of the ranges."""

    KINDS = LION_MOMENTS

    def update(
        self, index: int, chunk: StepChunk, segments: torch.Tensor, hyper: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """See :class:`Moments`."""
        master, exp_avg = self._ranges[index].state.read_kinds((MASTER, *self.KINDS), chunk.begin, chunk.end)
        buffers = (master, exp_avg, chunk.gradient, chunk.output)
        ops.lion_step_(*buffers, segments, hyper, scale, flag_on(self.flag, master.device))


class LambMoments(FloatMoments):
    """LAMB's moments in fp32 or bf16, as state of the ranges."""

    def update(
        self, index: int, chunk: StepChunk, segments: torch.Tensor, hyper: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """See :class:`Moments`."""
        state = self._ranges[index].state
        master, exp_avg, exp_avg_sq = state.read_kinds((MASTER, *MOMENTS), chunk.begin, chunk.end)
        buffers = (master, exp_avg, exp_avg_sq, chunk.gradient, chunk.output)
        ops.lamb_step_(*buffers, segments, hyper, scale, flag_on(self.flag, master.device))


class EightBitMoments:
    """Moments quantized block by block (Dettmers et al., arXiv 2110.02861): a byte an element and a scale for
    256 of them. Blocks are counted from each range's first element, whatever parameters are there."""

    flag: NonFiniteFlag | None = None

    def __init__(self, ranges: Sequence[OwnedRange]) -> None:
        self._ranges = tuple(ranges)
        _add_state(ranges, moment_fields("8bit"))

    def update(
        self, index: int, chunk: StepChunk, segments: torch.Tensor, hyper: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """See :class:`Moments`."""
        state = self._ranges[index].state
        master = state.read(MASTER, chunk.begin, chunk.end)
        exp_avg, exp_avg_sq = (
            ops.Quantized(*state.read_kinds((codes_of(kind), scales_of(kind)), chunk.begin, chunk.end))
            for kind in MOMENTS
        )
        buffers = (master, exp_avg, exp_avg_sq, chunk.gradient, chunk.output)
        ops.adam_step_8bit_(*buffers, segments, hyper, scale, flag_on(self.flag, master.device))

    def values(self, index: int) -> Iterator[tuple[str, Segment, Values]]:
        """See :class:`Moments`: as float32. Where the same range is cut in the same blocks again, these have
        the codes and scales they had; elsewhere they are quantized anew."""
        owned = self._ranges[index]
        for kind, signed in zip(MOMENTS, _SIGNED, strict=True):
            blocks = DequantizedState(owned.state, kind, signed)
            for segment in owned.segments:
                yield kind, segment, blocks.view(segment.begin, segment.end)


def _add_state(ranges: Sequence[OwnedRange], fields: Mapping[str, StateField]) -> None:
    for owned in ranges:
        for kind, field in fields.items():
            owned.state.add(kind, field)
