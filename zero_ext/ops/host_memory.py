"""Memory of tensors: huge pages of the host, and two storages that exchange theirs."""

from __future__ import annotations

from functools import cache
from types import ModuleType

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


def torch_swaps_storages() -> bool:
    """Return whether PyTorch itself can do it."""
    return getattr(torch.UntypedStorage, "_swap_data_ptr_", None) is not None


@cache
def load_storage_swap() -> ModuleType:
    """Return the module ``_C_storage``, from the cache or compiled now: seconds, once for a PyTorch.

    Raises:
        RuntimeError: it must be compiled and cannot be: no C++ compiler, a failed compilation, a cache folder
            that is not writable.
    """
    # Imported late, like all that only a build needs.
    from zero_ext.ops.jit.jit_build import build_storage_swap

    return build_storage_swap()


def swap_storages_(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchange memory and size of two storages on one device, of equal size or one of them empty.

    Tensors keep their storage object, those that autograd saved too, and see its new memory. Raises
    ``RuntimeError`` for storages that do not fit, and what :func:`load_storage_swap` raises.
    """
    own = getattr(one, "_swap_data_ptr_", None)  # torch's stubs do not know it
    if own is not None:
        own(other)
    else:
        load_storage_swap().swap(one._cdata, other._cdata)
