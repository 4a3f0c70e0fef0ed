"""State in 8-bit blocks as the float32 values it represents, for checkpoints."""

from __future__ import annotations

from typing import NamedTuple

import torch

from zero_ext import ops
from zero_ext.offload import OptimizerStateStorage, StorageRange, Values


def codes_of(kind: str) -> str:
    """Return the state that holds the codes of ``kind``."""
    return f"{kind}_codes"


def scales_of(kind: str) -> str:
    """Return the state that holds the scales of ``kind``."""
    return f"{kind}_scales"


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
