"""Bytes of host tensors: raw views for system calls, aligned blocks, copies outside the interpreter lock."""

from __future__ import annotations

import ctypes
import mmap

import torch


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as uint8 [nbytes]."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def raw_view(data: torch.Tensor) -> memoryview:
    """Return a writable buffer over ``data`` (uint8 [n]); the caller keeps ``data`` alive meanwhile."""
    size = data.numel()
    if size == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * size).from_address(data.data_ptr())).cast("B")


def copy_bytes(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` (uint8 [n]) over ``destination`` (uint8 [n]) on this thread alone.

    torch's own copy would start worker threads of its own besides those of the training step.
    """
    if destination.numel() != source.numel():
        raise ValueError(
            f"destination: expected {source.numel()} bytes, the size of the source, got "
            f"{destination.numel()}. Pass buffers of one size."
        )
    if source.numel():
        ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.numel())


def aligned_block(size: int) -> torch.Tensor:
    """Return a page-aligned uint8 [size] block, as direct I/O needs it."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
