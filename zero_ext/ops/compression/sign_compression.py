"""Compression to signs with error feedback: one bit an element and one scale a block of 8,192.

A message of n elements is uint8 [:func:`sign_message_bytes` (n)]: a bit for each element, set where it is
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


def compress_signs_(messages: Tensor, errors: Tensor, values: Tensor, factor: float, parts: int) -> None:
    """Compresses ``values * factor + errors``; `errors` becomes what that left behind.

    Args:
        messages: uint8 [parts * sign_message_bytes(n / parts)], aligned to 4 bytes; overwritten.
        errors: float32 [n], of which element i belongs to ``values[i]``.
        values: float32, bfloat16 or float16 [n].
        factor: finite, for example 1 / gradient scale.
        parts: equal parts of the values, each a message of its own; it must divide n.

    All tensors are contiguous, on one device, the CPU or a CUDA one, and share no memory.

    Raises:
        RuntimeError: an argument has the wrong dtype, device, layout, size or alignment, memory overlaps,
            `parts` does not divide n, or `factor` is not finite; nothing has been changed.
    """
    op("compress_signs_")(messages, errors, values, factor, parts)
    torch.autograd.graph.increment_version((messages, errors))


def expand_signs_(out: Tensor, messages: Tensor, factor: float, accumulate: bool, parts: int) -> None:
    """Writes factor * (what `messages` stand for) to `out`, plus its old value if `accumulate`.

    Args:
        out: float32, bfloat16 or float16 [n].
        messages: uint8 [parts * sign_message_bytes(n / parts)], of the parts of `out` in order.
        factor: finite.
        accumulate: add to `out` instead of replacing it.
        parts: it must divide n.

    Errors as for :func:`compress_signs_`.
    """
    op("expand_signs_")(out, messages, factor, accumulate, parts)
    torch.autograd.graph.increment_version(out)


def sum_signs_(out: Tensor, messages: Tensor, factor: float, accumulate: bool) -> None:
    """Writes factor * (sum of what `messages` stand for) to `out`, plus its old value if `accumulate`.

    Args:
        out: float32 [m].
        messages: uint8 [k * sign_message_bytes(m)], k messages of the same elements, added in order.
        factor: finite, for example 1 / world size.
        accumulate: add to `out` instead of replacing it.

    Errors as for :func:`compress_signs_`.
    """
    op("sum_signs_")(out, messages, factor, accumulate)
    torch.autograd.graph.increment_version(out)


def reduce_signs_(message: Tensor, error: Tensor, messages: Tensor, factor: float) -> None:
    """Compresses factor * (sum of what `messages` stand for) + `error`, which becomes what that left behind.

    The part of a rank that owns these elements in a compressed all-reduce (the paper's server).

    Args:
        message: uint8 [sign_message_bytes(m)], aligned to 4 bytes; overwritten.
        error: float32 [m].
        messages: uint8 [k * sign_message_bytes(m)], k messages of the same elements, added in order.
        factor: finite, for example 1 / world size.

    Errors as for :func:`compress_signs_`.
    """
    op("reduce_signs_")(message, error, messages, factor)
    torch.autograd.graph.increment_version((message, error))


@fake_kernel("compress_signs_")
def _compress_signs_(messages: Tensor, errors: Tensor, values: Tensor, factor: float, parts: int) -> None:
    check_one_device("compress_signs_", [messages, errors, values])


@fake_kernel("expand_signs_")
def _expand_signs_(out: Tensor, messages: Tensor, factor: float, accumulate: bool, parts: int) -> None:
    check_one_device("expand_signs_", [out, messages])


@fake_kernel("sum_signs_")
def _sum_signs_(out: Tensor, messages: Tensor, factor: float, accumulate: bool) -> None:
    check_one_device("sum_signs_", [out, messages])


@fake_kernel("reduce_signs_")
def _reduce_signs_(message: Tensor, error: Tensor, messages: Tensor, factor: float) -> None:
    check_one_device("reduce_signs_", [message, error, messages])
