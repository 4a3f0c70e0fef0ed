"""Loads the C++ extension: the built module ``zero_ext._C``, or one built just in time.

Importing :mod:`zero_ext.ops` loads a built ``_C`` at once, and with it ``_C_cuda``, the CUDA kernels, where
torch has CUDA and the module was built. In a source tree without ``_C`` the first op that is called builds
it (see :mod:`zero_ext.ops.build`).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

NAMESPACE = "zero_ext"
CUDA_MODULE = "zero_ext._C_cuda"

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

# Fake kernels by op name. torch accepts them only once the op exists, so they wait here for the load.
FAKE_KERNELS: dict[str, Callable[..., Any]] = {}


def fake_kernel(name: str) -> Callable[[Kernel], Kernel]:
    """Declares the decorated function the fake kernel of op `name`: shapes and dtypes without data."""

    def declare(function: Kernel) -> Kernel:
        FAKE_KERNELS[name] = function
        return function

    return declare


def check_one_device(name: str, tensors: Iterable[Tensor]) -> None:
    """Refuses a mixture of devices, which would silently run a fake kernel because one tensor is meta."""
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise RuntimeError(f"{name}: tensors on {', '.join(devices)}; all must be on one device")


def is_built() -> bool:
    """Whether a built ``zero_ext._C`` can be imported."""
    return importlib.util.find_spec("zero_ext._C") is not None


@cache
def load() -> ModuleType:
    """The extension module; loading it registers the ops and their fake kernels.

    Raises:
        RuntimeError: there is no built module, and building one failed or no compiler was found.
    """
    if is_built():
        module = importlib.import_module("zero_ext._C")
    else:
        # Imported late: torch's build tools take longer to import than the rest of this package.
        from zero_ext.ops.build import build, import_from

        module = import_from(build())
    if torch.version.cuda is not None and importlib.util.find_spec(CUDA_MODULE) is not None:
        importlib.import_module(CUDA_MODULE)
    for name, kernel in FAKE_KERNELS.items():
        torch.library.register_fake(f"{NAMESPACE}::{name}", kernel)
    return module


@cache
def op(name: str) -> Any:
    """The callable overload ``torch.ops.zero_ext.<name>.default``, with the extension loaded."""
    load()
    return getattr(getattr(torch.ops, NAMESPACE), name).default
