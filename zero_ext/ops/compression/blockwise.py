"""Block-wise quantization to 8-bit dynamic codes, and back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zero_ext.config.buffer_sizes import BLOCK_ELEMENTS, block_count
from zero_ext.ops.load_library import check_one_device, fake_kernel, op

__all__ = ["BLOCK_ELEMENTS", "Quantized", "block_count", "dequantize_blockwise", "quantize_blockwise"]


class Quantized(NamedTuple):
    """Elements quantized block by block: ``codes`` uint8 [n] and ``scales`` float32 [ceil(n / 256)]."""

    codes: Tensor
    scales: Tensor


def quantize_blockwise(values: Tensor, signed: bool) -> Quantized:
    """Quantize to one byte an element and one scale a block of 256 elements, counted from the first.

    A block's scale is its element of largest magnitude, with its sign (the positive one of two equals), so
    that element is kept exactly and quantizing again changes nothing. A code stands for the value nearest to
    element / scale, halfway for the one of larger magnitude, among the 256 of a dynamic code: 0, 1, and the
    middles of 2^f equal intervals of the decades (10^-(k+1), 10^-k], k = 0..6. The signed code has f = 6 - k
    and both signs, the unsigned one f = 7 - k; codes are ranks by value. In the unsigned code a positive
    value never becomes zero (down to 3e-39 of the scale).

    A block with a NaN or an infinity gets the scale NaN, and reads back as NaN throughout. One with a largest
    magnitude is below 2^-126 reads back as zeros.

    Args:
        values: float32 [n], contiguous, on the CPU or a CUDA device.
        signed: the signed code; the unsigned one takes no negative values. On a CUDA device the host does not
            wait to see them: the block of a negative one reads back as NaN, and
            :func:`~zero_ext.ops.raise_device_errors` raises it.

    Raises:
        RuntimeError: `values` has the wrong dtype, device, layout or size, or is negative somewhere without
            `signed`.

    Source: Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit optimizers via block-wise quantization" (arXiv
    2110.02861), sections 1.3, 2.1 and 2.2.
    """
    return Quantized(*op("quantize_blockwise")(values, signed))


def dequantize_blockwise(quantized: Quantized, signed: bool) -> Tensor:
    """Return what :func:`quantize_blockwise` wrote: value of the code times scale of the block, in float32.

    Returns:
        float32 [n].

    Raises:
        RuntimeError: a tensor has the wrong dtype, device, layout or size.
    """
    return op("dequantize_blockwise")(quantized.codes, quantized.scales, signed)


@fake_kernel("quantize_blockwise")
def _quantize_blockwise(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    scales = values.new_empty(block_count(values.numel()))
    return values.new_empty(values.numel(), dtype=torch.uint8), scales


@fake_kernel("dequantize_blockwise")
def _dequantize_blockwise(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    check_one_device("dequantize_blockwise", [codes, scales])
    return codes.new_empty(codes.numel(), dtype=torch.float32)
