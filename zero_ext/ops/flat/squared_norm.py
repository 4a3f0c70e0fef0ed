"""The exact sum of squares behind the global gradient norm."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_ext.ops.load_library import check_one_device, fake_kernel, op

ACCUMULATOR_ENTRIES = 33


def squared_norm_(grad: Tensor, accumulator: Tensor) -> None:
    """Add the exact sum of squares of `grad` to `accumulator`.

    Entry i below 32 counts multiples of 2^(20 i - 298); entry 32 counts the elements that are not finite,
    which add nothing else. The entries are integers, so the result does not depend on order, threads, or
    the boundaries of shards, buckets and chunks. Entries below the highest are left in [0, 2^20): the
    accumulators of 65,536 ranks can be summed in int64.

    Args:
        grad: float32, bfloat16 or float16 [n], contiguous, on the CPU or a CUDA device.
        accumulator: int64 [33], zeros before the first call.

    Raises:
        RuntimeError: an argument has the wrong dtype, device, layout or size; nothing has been changed.

    Source: Demmel and Nguyen, "Parallel reproducible summation" (2015); Rump, Ogita and Oishi, "Accurate
    floating-point summation" (2008), section 3.
    """
    op("squared_norm_")(grad, accumulator)
    torch.autograd.graph.increment_version(accumulator)


def squared_norm_value(accumulator: Tensor) -> Tensor:
    """Return the sum that `accumulator` holds, correctly rounded.

    Args:
        accumulator: int64 [33], from :func:`squared_norm_`, or a sum of such tensors.

    Returns:
        float64, 0-d; NaN when an element was not finite.

    Raises:
        RuntimeError: the argument has the wrong dtype, device, layout or size, or holds a negative sum. On a
            CUDA device such a sum gives NaN, and :func:`~zero_ext.ops.raise_device_errors` raises it.
    """
    return op("squared_norm_value")(accumulator)


@fake_kernel("squared_norm_")
def _squared_norm_(grad: Tensor, accumulator: Tensor) -> None:
    check_one_device("squared_norm_", [grad, accumulator])


@fake_kernel("squared_norm_value")
def _squared_norm_value(accumulator: Tensor) -> Tensor:
    return accumulator.new_empty((), dtype=torch.float64)
