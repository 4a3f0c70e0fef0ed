"""Flat buffers: tensors into and out of them, sums of shards, exact squared norms, NaN and infinity."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_ext.ops.load_library import fake_kernel, inplace, op


def pack_(flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """Copy every tensor, cast to the dtype of `flat`, to ``flat[offset : offset + numel]``.

    Args:
        flat: float32, bfloat16 or float16 [n].
        tensors: any shapes, float32, bfloat16 or float16 each.
        offsets: one per tensor, in elements of `flat`; the places must lie inside and not overlap.

    All tensors are contiguous, on one device, the CPU or a CUDA one, and share no memory with one another.

    Raises:
        RuntimeError: an argument has the wrong dtype, device or layout, does not fit, or memory overlaps;
            nothing has been changed.
    """
    inplace("pack_")(flat, tensors, offsets)


def accumulate_(flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """Add every tensor to its place in `flat`, in float32, cast to the dtype of `flat`.

    Arguments and errors as in :func:`pack_`.
    """
    inplace("accumulate_")(flat, tensors, offsets)


def unpack_(flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """Copy ``flat[offset : offset + numel]`` to every tensor, cast to the tensor's dtype.

    Arguments and errors as in :func:`pack_`.
    """
    inplace("unpack_")(flat, tensors, offsets)


def sum_shards_(out: Tensor, shards: Sequence[Tensor], scale: float, accumulate: bool) -> None:
    """Write ``cast(scale * (shards[0] + shards[1] + ...))`` to `out`, plus its old value if `accumulate`.

    Everything is computed in float32, the sum in list order.

    Args:
        out: float32, bfloat16 or float16 [n]; may be exactly the memory of one of the shards.
        shards: one or more of one dtype (float32, bfloat16 or float16), [n] each; at most 256 on a CUDA
            device.
        scale: for example 1 / world size.
        accumulate: add to `out` instead of replacing it.

    Raises:
        RuntimeError: an argument has the wrong dtype, device, layout or size, `shards` is empty, or `out`
            overlaps a shard without being it; nothing has been changed.
    """
    inplace("sum_shards_")(out, shards, scale, accumulate)


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
    inplace("squared_norm_")(grad, accumulator)


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


@fake_kernel("squared_norm_value")
def _squared_norm_value(accumulator: Tensor) -> Tensor:
    return accumulator.new_empty((), dtype=torch.float64)


def flag_non_finite_(values: Tensor, non_finite: Tensor) -> None:
    """Set `non_finite` to 1 if an element of `values` is NaN or infinite, and leave it alone otherwise.

    The elements are compared as integers, so the op reads them at the speed of memory. On a CUDA device the
    host does not wait.

    Args:
        values: float32, bfloat16 or float16 [n], contiguous, on the CPU or a CUDA device.
        non_finite: int32 [1], on the same device. One flag may serve any number of tensors.

    Raises:
        RuntimeError: an argument has the wrong dtype, device, layout or size; nothing has been changed.
    """
    inplace("flag_non_finite_")(values, non_finite)
