"""Two storages exchange their memory, while all that refers to them stays.

PyTorch has this from 2.12 on. For 2.11 it is compiled at first use: module ``_C_storage``, the one part of
the package that depends on the very PyTorch it was built for.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch


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
