"""Where Adam's two moments are kept and in which precision: floats beside the masters, or 8-bit blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import torch

from zero_ext import ops
from zero_ext.offload import MASTER, StepPart, Values, allocate
from zero_ext.optim.stepper import OwnedRange, Segment

MOMENTS = ("exp_avg", "exp_avg_sq")
MomentsDtype = torch.dtype | Literal["8bit"]
_BY_NAME: dict[str, MomentsDtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": "8bit"}


def moments_dtype_named(name: str) -> MomentsDtype:
    """What the configuration's ``precision.moments_dtype`` names."""
    return _BY_NAME[name]


class Moments(Protocol):
    """Both moments of every owned range; zeros at first. ``index`` counts the ranges."""

    def update(
        self, index: int, part: StepPart, segments: torch.Tensor, hyper: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """Adam over one part of a range; ``segments``, ``hyper`` and ``scale`` as `ops.adam_step_` takes
        them."""

    def values(self, index: int) -> Iterator[tuple[str, Segment, Values]]:
        """See :class:`Stepper`."""

    def memory_bytes(self) -> int:
        """Bytes of memory that the ranges' own state does not count."""


class FloatMoments:
    """Moments in fp32 or bf16, as state of the ranges."""

    def __init__(self, ranges: Sequence[OwnedRange], dtype: torch.dtype) -> None:
        self._ranges = tuple(ranges)
        for owned in ranges:
            for kind in MOMENTS:
                owned.state.add(kind, dtype)

    def update(
        self, index: int, part: StepPart, segments: torch.Tensor, hyper: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """See :class:`Moments`."""
        master, exp_avg, exp_avg_sq = (
            self._ranges[index].state.read(kind, part.begin, part.end) for kind in (MASTER, *MOMENTS)
        )
        ops.adam_step_(master, exp_avg, exp_avg_sq, part.gradient, part.output, segments, hyper, scale)

    def values(self, index: int) -> Iterator[tuple[str, Segment, Values]]:
        """See :class:`Moments`."""
        owned = self._ranges[index]
        for kind in MOMENTS:
            for segment in owned.segments:
                yield kind, segment, owned.state.run(kind, segment.begin, segment.begin + segment.numel)

    def memory_bytes(self) -> int:
        """See :class:`Moments`: none, they lie beside the master weights."""
        return 0


class EightBitMoments:
    """Moments quantized block by block (Dettmers et al., arXiv 2110.02861): a byte an element and a scale for
    256 of them. Blocks are counted from each range's first element."""

    def __init__(self, ranges: Sequence[OwnedRange]) -> None:
        self._ranges = tuple(ranges)
        # Beside master weights in storage the moments are there, too.
        self._moments = [
            tuple(_zeros(owned.state.numel) for _ in MOMENTS) if owned.state.tier != "nvme" else ()
            for owned in ranges
        ]

    def update(
        self, index: int, part: StepPart, segments: torch.Tensor, hyper: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """See :class:`Moments`."""
        master = self._ranges[index].state.read(MASTER, part.begin, part.end)
        exp_avg, exp_avg_sq = (_part(moment, part.begin, part.end) for moment in self._moments[index])
        ops.adam_step_8bit_(master, exp_avg, exp_avg_sq, part.gradient, part.output, segments, hyper, scale)

    def values(self, index: int) -> Iterator[tuple[str, Segment, Values]]:
        """Refused with ``RuntimeError``: blocks cross the parameters' borders, so no parameter's moments can
        be replaced by themselves."""
        raise RuntimeError(
            "precision.moments_dtype '8bit': quantized optimizer state can be neither saved nor loaded; for "
            "checkpoints and optimizer.state_dict() take 'fp32' or 'bf16' moments, or save the model alone "
            "with zero_ext.full_state_dict(model)"
        )

    def memory_bytes(self) -> int:
        """See :class:`Moments`."""
        return sum(part.nbytes for moments in self._moments for quantized in moments for part in quantized)


def _zeros(numel: int) -> ops.Quantized:
    """Quantized zeros: with a scale of zero every code is one."""
    return ops.Quantized(allocate(numel, torch.uint8), allocate(ops.block_count(numel), torch.float32))


def _part(moment: ops.Quantized, begin: int, end: int) -> ops.Quantized:
    """Elements [begin, end), where ``begin`` starts a block: a step's parts hold whole pages of floats."""
    if begin % ops.BLOCK_ELEMENTS:
        raise AssertionError(f"a part begins at element {begin}, inside a block of {ops.BLOCK_ELEMENTS}")
    first, last = begin // ops.BLOCK_ELEMENTS, ops.block_count(end)
    return ops.Quantized(moment.codes[begin:end], moment.scales[first:last])
