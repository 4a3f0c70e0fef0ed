"""Quantization block by block, to 8-bit dynamic codes, integers of 4 or 8 bits, and signs.

Integers: a payload of n elements in a :class:`BlockFormat` is uint8 [``format.payload_bytes(n)``]: the codes,
padded to a multiple of 8 elements, then for each block its scale in float32 and, if asymmetric, its lowest
element. Symmetric: scale = largest magnitude / (2^(bits-1) - 1), and an element is round(x / scale) * scale:
zeros stay zeros. Asymmetric: scale = (highest - lowest) / (2^bits - 1), and an element is
lowest + round((x - lowest) / scale) * scale: constant blocks stay as they are. Rounding is to nearest even,
so that the error is half a scale at most, up to float32's rounding. The layout of the codes is described in
csrc/core/compression/integer_block_formula.h. A block with a NaN or an infinity, or with a range beyond
float32's, reads back as NaN throughout. One with a scale below 2^-126 reads back as zeros (symmetric) or its
lowest element (asymmetric). Source: Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit optimizers via
block-wise quantization" (arXiv 2110.02861), section 2.1; Wang, Qin, Jacobs et al., "ZeRO++" (arXiv
2306.10209), sections 3.1 and 3.3.

Signs with error feedback: a payload of n elements is uint8 [:func:`sign_payload_bytes` (n)]: a bit for each
element, set where it is zero or more, padded to 4 bytes with clear bits; then in float32 the scales of blocks
of 8,192, each a block's mean magnitude. An element stands for +-scale. A NaN or an infinity makes its block's
scale non-finite, so that all elements of the block come out so, and the errors that compressing leaves too:
agree that all values are finite before compressing them. Source: Tang, Gan, Awan, Rajbhandari et al.,
"1-bit Adam" (arXiv 2102.02888), section 4.2.

Both are computed in float32, with the same bits on every device and for any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from zero_ext.config.buffer_sizes import block_count
from zero_ext.ops.load_library import check_one_device, fake_kernel, inplace, op


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


PADDING = 8
BLOCK_UNIT = 128
HIGHEST_BLOCK = 4096


@dataclass(frozen=True)
class BlockFormat:
    """The quantization of elements: `bits` 4 or 8, and `block` elements to a scale.

    Raises:
        ValueError: `bits` is neither, or `block` is no multiple of 128 from 128 to 4,096.
    """

    bits: Literal[4, 8]
    symmetric: bool
    block: int = 256

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"BlockFormat.bits: expected 4 or 8, got {self.bits!r}. Choose one of them.")
        if not (0 < self.block <= HIGHEST_BLOCK and self.block % BLOCK_UNIT == 0):
            raise ValueError(
                f"BlockFormat.block: expected a multiple of {BLOCK_UNIT} elements from {BLOCK_UNIT} to "
                f"{HIGHEST_BLOCK}, got {self.block}. Round it to such a multiple."
            )

    def payload_bytes(self, numel: int) -> int:
        """Return bytes of the payload of `numel` elements, a multiple of 4."""
        codes = -(-numel // PADDING) * PADDING * self.bits // 8
        return codes + (4 if self.symmetric else 8) * -(-numel // self.block)


def quantize_(
    payloads: Tensor,
    values: Tensor,
    format: BlockFormat,
    chunks: int,
    order: Sequence[int] | None = None,
) -> None:
    """Quantize `values` in equal chunks, each a payload of its own.

    Args:
        payloads: uint8 [chunks * format.payload_bytes(n / chunks)], aligned to 4 bytes; overwritten.
        values: float32, bfloat16 or float16 [n].
        format: of the payloads.
        chunks: it must divide n.
        order: payload p holds chunk ``order[p]`` of the values; chunk p by default.

    All tensors are contiguous, on one device, the CPU or a CUDA one, and share no memory.

    Raises:
        RuntimeError: an argument has the wrong dtype, device, layout, size or alignment, memory overlaps,
            `chunks` does not divide n, or `order` does not name each chunk once; nothing has been changed.
    """
    inplace("quantize_")(
        payloads, values, format.bits, format.symmetric, format.block, chunks, list(order or ())
    )


def dequantize_(out: Tensor, payloads: Tensor, format: BlockFormat, chunks: int) -> None:
    """Write what `payloads` stand for to `out`.

    Args:
        out: float32, bfloat16 or float16 [n].
        payloads: uint8 [chunks * format.payload_bytes(n / chunks)], of the chunks of `out` in order.
        format: of the payloads.
        chunks: it must divide n.

    Errors as for :func:`quantize_`.
    """
    inplace("dequantize_")(out, payloads, format.bits, format.symmetric, format.block, chunks)


def sum_quantized_(
    out: Tensor, payloads: Tensor, format: BlockFormat, factor: float, accumulate: bool
) -> None:
    """Write factor * (sum of what `payloads` stand for) to `out`, plus its old value if `accumulate`.

    Args:
        out: float32 [m].
        payloads: uint8 [k * format.payload_bytes(m)], k payloads of the same elements, added in order.
        format: of the payloads.
        factor: finite, for example 1 / world size.
        accumulate: add to `out` instead of replacing it.

    Errors as for :func:`quantize_`; RuntimeError, too, when `factor` is not finite.
    """
    inplace("sum_quantized_")(out, payloads, format.bits, format.symmetric, format.block, factor, accumulate)


def requantize_(
    payloads_out: Tensor,
    payloads_in: Tensor,
    format: BlockFormat,
    out_format: BlockFormat | None,
    factor: float,
    chunks: int,
) -> None:
    """For each chunk, quantizes factor * (sum of what its k payloads stand for), in one pass.

    Args:
        payloads_out: uint8 [chunks * out_format.payload_bytes(m)], aligned to 4 bytes; overwritten.
        payloads_in: uint8 [k * chunks * format.payload_bytes(m)]: `chunks` payloads of the first sender, then
            those of the second, and so on; added in the order of senders.
        format: of `payloads_in`.
        out_format: of `payloads_out`, with blocks of the same size; None: `format`.
        factor: finite, for example 1 / senders.
        chunks: payloads of each sender.

    Errors as for :func:`quantize_`; RuntimeError, too, when `factor` is not finite or the blocks differ.
    """
    to = out_format or format
    source = (format.bits, format.symmetric, format.block)
    target = (to.bits, to.symmetric, to.block)
    inplace("requantize_")(payloads_out, payloads_in, *source, *target, factor, chunks)


def compress_1bit_(payloads: Tensor, errors: Tensor, values: Tensor, factor: float, chunks: int) -> None:
    """Compress ``values * factor + errors``; `errors` becomes what that left behind.

    Args:
        payloads: uint8 [chunks * sign_payload_bytes(n / chunks)], aligned to 4 bytes; overwritten.
        errors: float32 [n]; element i belongs to ``values[i]``.
        values: float32, bfloat16 or float16 [n].
        factor: finite, for example 1 / gradient scale.
        chunks: equal chunks of the values, each a payload of its own; it must divide n.

    All tensors are contiguous, on one device, the CPU or a CUDA one, and share no memory.

    Raises:
        RuntimeError: an argument has the wrong dtype, device, layout, size or alignment, memory overlaps,
            `chunks` does not divide n, or `factor` is not finite; nothing has been changed.
    """
    inplace("compress_1bit_")(payloads, errors, values, factor, chunks)


def decompress_1bit_(out: Tensor, payloads: Tensor, factor: float, accumulate: bool, chunks: int) -> None:
    """Write factor * (what `payloads` stand for) to `out`, plus its old value if `accumulate`.

    Args:
        out: float32, bfloat16 or float16 [n].
        payloads: uint8 [chunks * sign_payload_bytes(n / chunks)], of the chunks of `out` in order.
        factor: finite.
        accumulate: add to `out` instead of replacing it.
        chunks: it must divide n.

    Errors as for :func:`compress_1bit_`.
    """
    inplace("decompress_1bit_")(out, payloads, factor, accumulate, chunks)


def sum_1bit_(out: Tensor, payloads: Tensor, factor: float, accumulate: bool) -> None:
    """Write factor * (sum of what `payloads` stand for) to `out`, plus its old value if `accumulate`.

    Args:
        out: float32 [m].
        payloads: uint8 [k * sign_payload_bytes(m)], k payloads of the same elements, added in order.
        factor: finite, for example 1 / world size.
        accumulate: add to `out` instead of replacing it.

    Errors as for :func:`compress_1bit_`.
    """
    inplace("sum_1bit_")(out, payloads, factor, accumulate)


def reduce_1bit_(payload: Tensor, error: Tensor, payloads: Tensor, factor: float) -> None:
    """Compress factor * (sum of what `payloads` stand for) + `error`, which becomes what that left behind.

    The chunk of a rank that owns these elements in a compressed all-reduce (the paper's server).

    Args:
        payload: uint8 [sign_payload_bytes(m)], aligned to 4 bytes; overwritten.
        error: float32 [m].
        payloads: uint8 [k * sign_payload_bytes(m)], k payloads of the same elements, added in order.
        factor: finite, for example 1 / world size.

    Errors as for :func:`compress_1bit_`.
    """
    inplace("reduce_1bit_")(payload, error, payloads, factor)
