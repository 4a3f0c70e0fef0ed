"""Compression to signs with error feedback: one bit an element and one scale a block of 8,192.

A payload of n elements is uint8 [:func:`sign_payload_bytes` (n)]: a bit for each element, set where it is
zero or more, padded to 4 bytes with clear bits; then the blocks' scales in float32, a block's mean magnitude.
An element stands for +-scale. Everything is computed in float32, with the same bits on every device and for
any number of threads.

A NaN or an infinity makes its block's scale non-finite, so that all elements of the block come out so, and
the errors that compressing leaves too: agree that all values are finite before compressing them.

Source: Tang, Gan, Awan, Rajbhandari et al., "1-bit Adam" (arXiv 2102.02888), section 4.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero_ext.ops.load_library import check_one_device, fake_kernel, op


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
    op("compress_1bit_")(payloads, errors, values, factor, chunks)
    torch.autograd.graph.increment_version((payloads, errors))


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
    op("decompress_1bit_")(out, payloads, factor, accumulate, chunks)
    torch.autograd.graph.increment_version(out)


def sum_1bit_(out: Tensor, payloads: Tensor, factor: float, accumulate: bool) -> None:
    """Write factor * (sum of what `payloads` stand for) to `out`, plus its old value if `accumulate`.

    Args:
        out: float32 [m].
        payloads: uint8 [k * sign_payload_bytes(m)], k payloads of the same elements, added in order.
        factor: finite, for example 1 / world size.
        accumulate: add to `out` instead of replacing it.

    Errors as for :func:`compress_1bit_`.
    """
    op("sum_1bit_")(out, payloads, factor, accumulate)
    torch.autograd.graph.increment_version(out)


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
    op("reduce_1bit_")(payload, error, payloads, factor)
    torch.autograd.graph.increment_version((payload, error))


@fake_kernel("compress_1bit_")
def _compress_1bit_(payloads: Tensor, errors: Tensor, values: Tensor, factor: float, chunks: int) -> None:
    check_one_device("compress_1bit_", [payloads, errors, values])


@fake_kernel("decompress_1bit_")
def _decompress_1bit_(out: Tensor, payloads: Tensor, factor: float, accumulate: bool, chunks: int) -> None:
    check_one_device("decompress_1bit_", [out, payloads])


@fake_kernel("sum_1bit_")
def _sum_1bit_(out: Tensor, payloads: Tensor, factor: float, accumulate: bool) -> None:
    check_one_device("sum_1bit_", [out, payloads])


@fake_kernel("reduce_1bit_")
def _reduce_1bit_(payload: Tensor, error: Tensor, payloads: Tensor, factor: float) -> None:
    check_one_device("reduce_1bit_", [payload, error, payloads])
