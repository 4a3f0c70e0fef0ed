"""Host memory on huge pages."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_ext.ops.load_library import fake_kernel, op


def host_buffer(nbytes: int) -> Tensor:
    """Return a zero-filled uint8 tensor [nbytes] on memory of its own.

    The memory comes from mmap at a 2 MiB boundary with MADV_HUGEPAGE, takes physical pages as they are
    touched, and goes back to the kernel when the last view of the tensor is gone.

    Raises:
        RuntimeError: `nbytes` is negative, or the kernel refuses (its reason is in the message).
    """
    return op("host_buffer")(nbytes)


def host_buffer_bytes() -> int:
    """Return bytes of all live host buffers of this process."""
    return op("host_buffer_bytes")()


def nan_filled_host_memory(nbytes: int) -> Tensor:
    """Return a uint8 tensor [nbytes] of 0xFF, which is NaN in every floating-point dtype.

    Its memory takes a few MiB until it is written to, however large it is. It goes back to the kernel when
    the last view of the tensor is gone.

    Raises:
        RuntimeError: `nbytes` is negative, or the kernel refuses (its reason is in the message).
    """
    return op("nan_filled_host_memory")(nbytes)


@fake_kernel("host_buffer")
def _host_buffer(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


@fake_kernel("nan_filled_host_memory")
def _blank_host_memory(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


@fake_kernel("host_buffer_bytes")
def _host_buffer_bytes() -> torch.SymInt:
    return torch.library.get_ctx().new_dynamic_size()
