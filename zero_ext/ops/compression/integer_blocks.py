"""Block-wise quantization to integers of 4 or 8 bits, sums of what is quantized, and both in one pass.

A payload of n elements in a :class:`BlockFormat` is uint8 [``format.payload_bytes(n)``]: the codes, padded to
a multiple of 8 elements, then for each block its scale in float32 and, if asymmetric, its lowest element.

Symmetric: scale = largest magnitude / (2^(bits-1) - 1), and an element is round(x / scale) * scale: zeros
stay zeros. Asymmetric: scale = (highest - lowest) / (2^bits - 1), and an element is
lowest + round((x - lowest) / scale) * scale: constant blocks stay as they are. Rounding is to nearest even,
so that the error is half a scale at most, up to float32's rounding. The layout of the codes is described in
csrc/core/compression/integer_block_formula.h.

A block with a NaN or an infinity, or with a range beyond float32's, reads back as NaN throughout. One with a
scale is below 2^-126 reads back as zeros (symmetric) or its lowest element (asymmetric).

Everything is computed in float32, with the same bits on every device and for any number of threads.

Source: Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit optimizers via block-wise quantization" (arXiv
2110.02861), section 2.1; Wang, Qin, Jacobs et al., "ZeRO++" (arXiv 2306.10209), sections 3.1 and 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zero_ext.ops.load_library import check_one_device, fake_kernel, op

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
    op("quantize_")(payloads, values, format.bits, format.symmetric, format.block, chunks, list(order or ()))
    torch.autograd.graph.increment_version(payloads)


def dequantize_(out: Tensor, payloads: Tensor, format: BlockFormat, chunks: int) -> None:
    """Write what `payloads` stand for to `out`.

    Args:
        out: float32, bfloat16 or float16 [n].
        payloads: uint8 [chunks * format.payload_bytes(n / chunks)], of the chunks of `out` in order.
        format: of the payloads.
        chunks: it must divide n.

    Errors as for :func:`quantize_`.
    """
    op("dequantize_")(out, payloads, format.bits, format.symmetric, format.block, chunks)
    torch.autograd.graph.increment_version(out)


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
    op("sum_quantized_")(out, payloads, format.bits, format.symmetric, format.block, factor, accumulate)
    torch.autograd.graph.increment_version(out)


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
    op("requantize_")(payloads_out, payloads_in, *source, *target, factor, chunks)
    torch.autograd.graph.increment_version(payloads_out)


@fake_kernel("quantize_")
def _quantize_(
    payloads: Tensor,
    values: Tensor,
    bits: int,
    symmetric: bool,
    block: int,
    chunks: int,
    order: Sequence[int],
) -> None:
    check_one_device("quantize_", [payloads, values])


@fake_kernel("dequantize_")
def _dequantize_(out: Tensor, payloads: Tensor, bits: int, symmetric: bool, block: int, chunks: int) -> None:
    check_one_device("dequantize_", [out, payloads])


@fake_kernel("sum_quantized_")
def _sum_quantized_(
    out: Tensor,
    payloads: Tensor,
    bits: int,
    symmetric: bool,
    block: int,
    factor: float,
    accumulate: bool,
) -> None:
    check_one_device("sum_quantized_", [out, payloads])


@fake_kernel("requantize_")
def _requantize_(payloads_out: Tensor, payloads_in: Tensor, *formats_factor_and_chunks: object) -> None:
    check_one_device("requantize_", [payloads_out, payloads_in])
