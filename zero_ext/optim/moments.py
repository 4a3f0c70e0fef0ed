"""Storage and precision of moments: floats alongside the masters, or Adam's in 8-bit blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from zero_ext import ops
from zero_ext.offload import MASTER, OptimizerStateStorage, StateField, StepChunk, StorageRange, Values
from zero_ext.optim.stepper import MomentsDtype, NonFiniteFlag, OwnedRange, Segment, flag_on

MOMENTS = ("exp_avg", "exp_avg_sq")
_SIGNED = (True, False)
_BY_NAME: dict[str, MomentsDtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": "8bit"}


def moments_dtype_named(name: str) -> MomentsDtype:
    """Return what the configuration's `precision.moments_dtype` names."""
    return _BY_NAME[name]


def codes_of(kind: str) -> str:
    """Return the state that holds the codes of ``kind``."""
    return f"{kind}_codes"


def scales_of(kind: str) -> str:
    """Return the state that holds the scales of ``kind``."""
    return f"{kind}_scales"


def moment_fields(dtype: MomentsDtype, moments: Sequence[str] = MOMENTS) -> dict[str, StateField]:
    """Return the state that ``moments`` of ``dtype`` take, Adam's in the order of ``ops.ADAM_FIELDS``."""
    if isinstance(dtype, torch.dtype):
        return dict.fromkeys(moments, StateField(dtype))
    scales = dict.fromkeys(map(scales_of, moments), StateField(torch.float32, ops.BLOCK_ELEMENTS))
    return {**scales, **dict.fromkeys(map(codes_of, moments), StateField(torch.uint8))}


class Moments(ABC):
    """The moments of every owned range; zeros at first. ``index`` counts the ranges. Updates raise ``flag``,
    if there is one, where a result is not finite."""

    flag: NonFiniteFlag | None = None

    def __init__(self, ranges: Sequence[OwnedRange], fields: Mapping[str, StateField]) -> None:
        self._ranges = tuple(ranges)
        for owned in ranges:
            for kind, field in fields.items():
                owned.state.add(kind, field)

    @abstractmethod
    def update(
        self, index: int, chunk: StepChunk, segments: torch.Tensor, hyper: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """Step one chunk of a range.

        ``segments``, ``hyper`` and ``scale`` are the arguments of its op, on the device where it reads them.
        """

    @abstractmethod
    def values(self, index: int) -> Iterator[tuple[str, Segment, Values]]:
        """See :class:`Stepper`."""


class FloatMoments(Moments):
    """Moments ``kinds`` in fp32 or bf16, as state of the ranges, that ``op`` steps with the masters."""

    def __init__(
        self,
        ranges: Sequence[OwnedRange],
        dtype: MomentsDtype,
        op: Callable[..., None] = ops.adam_step_,
        kinds: tuple[str, ...] = MOMENTS,
    ) -> None:
        super().__init__(ranges, moment_fields(dtype, kinds))
        self._op = op
        self._kinds = kinds

    def update(
        self, index: int, chunk: StepChunk, segments: torch.Tensor, hyper: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """See :class:`Moments`."""
        buffers = self._ranges[index].state.read_kinds((MASTER, *self._kinds), chunk.begin, chunk.end)
        flag = flag_on(self.flag, buffers[0].device)
        self._op(*buffers, chunk.gradient, chunk.output, segments, hyper, scale, flag)

    def values(self, index: int) -> Iterator[tuple[str, Segment, Values]]:
        """See :class:`Moments`."""
        owned = self._ranges[index]
        for kind in self._kinds:
            for segment in owned.segments:
                yield kind, segment, owned.state.view(kind, segment.begin, segment.end)


class EightBitMoments(Moments):
    """Moments quantized block by block (Dettmers et al., arXiv 2110.02861): a byte an element and a scale for
    256 of them. Blocks are counted from each range's first element, whatever parameters are there."""

    def __init__(self, ranges: Sequence[OwnedRange]) -> None:
        super().__init__(ranges, moment_fields("8bit"))

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


class _Partial(NamedTuple):
    """The written part of one block: values, and which of them."""

    values: torch.Tensor
    written: torch.Tensor


class DequantizedState:
    """One kind of state of a range, in 8-bit blocks, as float32 values; ``signed`` as in
    :func:`zero_ext.ops.quantize_blockwise`.

    Values that are read and written back give the same codes and scales, in slices of any size and order. A
    block that is written in several calls is quantized from all float32 values since this object was created,
    not from the result of the first call. Those values are kept until the block is complete.
    """

    def __init__(self, state: OptimizerStateStorage, kind: str, signed: bool) -> None:
        self._state = state
        self._kinds = (codes_of(kind), scales_of(kind))
        self._signed = signed
        self._partial: dict[int, _Partial] = {}  # by the block's first element

    def view(self, begin: int, end: int) -> Values:
        """Return the values of elements [begin, end)."""
        return StorageRange(begin, end - begin, torch.float32, self.read, self.write)

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return the values of elements [begin, end)."""
        first, last = self._around(begin, end)
        return self._decoded(first, last)[begin - first : end - first]

    def write(self, begin: int, values: torch.Tensor) -> None:
        """Quantize ``values`` in the place of the elements from ``begin`` on. What shares a block with them
        keeps its value, up to the rounding of the block's new scale.

        ``RuntimeError`` if one is negative where the code has no sign.
        """
        end = begin + values.numel()
        first, last = self._around(begin, end)
        blocks = {block for block in self._partial if first <= block < last}
        if (first, last) != (begin, end):
            decoded = self._decoded(first, last)
            decoded[begin - first : end - first] = values
            values = decoded
            blocks |= {first, (last - 1) // ops.BLOCK_ELEMENTS * ops.BLOCK_ELEMENTS}
        for block in blocks:
            self._complete(block, values[block - first :][: ops.BLOCK_ELEMENTS], begin, end)
        quantized = ops.quantize_blockwise(values, self._signed)
        self._state.write_kinds(self._kinds, first, last, quantized)

    def _complete(self, block: int, values: torch.Tensor, begin: int, end: int) -> None:
        """Add to ``values``, those of a block with [begin, end) written now, what came before."""
        low, high = max(begin - block, 0), min(end - block, values.numel())
        known = self._partial.pop(block, None)
        if high - low == values.numel():
            return
        if known is None:
            known = _Partial(values.clone(), torch.zeros(values.numel(), dtype=torch.bool, device="cpu"))
        known.values[low:high] = values[low:high]
        known.written[low:high] = True
        values[known.written] = known.values[known.written]
        if not known.written.all():
            self._partial[block] = known

    def _decoded(self, first: int, last: int) -> torch.Tensor:
        quantized = ops.Quantized(*self._state.read_kinds(self._kinds, first, last))
        return ops.dequantize_blockwise(quantized, self._signed)

    def _around(self, begin: int, end: int) -> tuple[int, int]:
        """Return the elements of the whole blocks around [begin, end)."""
        last = ops.block_count(end) * ops.BLOCK_ELEMENTS
        return begin // ops.BLOCK_ELEMENTS * ops.BLOCK_ELEMENTS, min(last, self._state.numel)
