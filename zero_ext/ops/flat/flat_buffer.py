"""Tensors into and out of flat buffers, and the sum of received shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_ext.ops.load_library import check_one_device, fake_kernel, op


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
    op("pack_")(flat, tensors, offsets)
    torch.autograd.graph.increment_version(flat)


def accumulate_(flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """Add every tensor to its place in `flat`, in float32, cast to the dtype of `flat`.

    Arguments and errors as in :func:`pack_`.
    """
    op("accumulate_")(flat, tensors, offsets)
    torch.autograd.graph.increment_version(flat)


def unpack_(flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """Copy ``flat[offset : offset + numel]`` to every tensor, cast to the tensor's dtype.

    Arguments and errors as in :func:`pack_`.
    """
    op("unpack_")(flat, tensors, offsets)
    torch.autograd.graph.increment_version(tensors)


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
    op("sum_shards_")(out, shards, scale, accumulate)
    torch.autograd.graph.increment_version(out)


@fake_kernel("pack_")
def _pack_(flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> None:
    check_one_device("pack_", [flat, *tensors])


@fake_kernel("accumulate_")
def _accumulate_(flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> None:
    check_one_device("accumulate_", [flat, *tensors])


@fake_kernel("unpack_")
def _unpack_(flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> None:
    check_one_device("unpack_", [flat, *tensors])


@fake_kernel("sum_shards_")
def _sum_shards_(out: Tensor, shards: Sequence[Tensor], scale: float, accumulate: bool) -> None:
    check_one_device("sum_shards_", [out, *shards])
