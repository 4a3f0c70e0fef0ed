"""Loads the C++ extension: the built module ``zero_ext._C``, or one built just in time.

Importing :mod:`zero_ext.ops` loads a built ``_C`` immediately, and with it ``_C_cuda``, the CUDA kernels,
where torch has CUDA and the module was built. It starts no CUDA and compiles nothing. In a source tree
without ``_C`` the first op that is called builds it; without a ``_C_cuda`` that loads, the first op that
meets a CUDA tensor does, or whoever calls :func:`load_kernels` before (see
:mod:`zero_ext.ops.jit.jit_build`).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import compress
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from zero_ext.ops.jit.toolchain import OLDEST_ARCHITECTURE, OLDEST_TORCH, Architecture

NAMESPACE = "zero_ext"
MODULE = "zero_ext._C"
CUDA_MODULE = "zero_ext._C_cuda"

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

# Fake kernels of ops that return tensors, by name. torch accepts them only once the op exists, so they wait
# here for the load.
FAKE_KERNELS: dict[str, Callable[..., Any]] = {}

# Gradients by op name, as (backward, setup_context) of torch.library.register_autograd.
AUTOGRAD_FORMULAS: dict[str, tuple[Callable[..., Any], Callable[..., None] | None]] = {}


def fake_kernel(name: str) -> Callable[[Kernel], Kernel]:
    """Declare the decorated function the fake kernel of op `name`, which returns tensors: shapes and dtypes
    without data."""

    def declare(function: Kernel) -> Kernel:
        FAKE_KERNELS[name] = function
        return function

    return declare


def autograd_formula(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., None] | None
) -> None:
    """Declare how op `name` is differentiated, by the functions of torch.library.register_autograd."""
    AUTOGRAD_FORMULAS[name] = (backward, setup_context)


def _fake_without_tensors(name: str, *arguments: Any, **named: Any) -> Any:
    """Return what an op returns that has no fake kernel of its own: nothing, a number or a text."""
    check_one_device(name, _tensors_of((*arguments, *named.values())))
    match [str(each.type) for each in getattr(torch.ops.zero_ext, name).default._schema.returns]:
        case ["int"]:
            return torch.library.get_ctx().new_dynamic_size()
        case ["str"]:
            return ""
        case ["bool"]:
            return True
    return None


def check_one_device(name: str, tensors: Iterable[Tensor]) -> None:
    """Refuse a mixture of devices, which would silently run a fake kernel because one tensor is meta."""
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise RuntimeError(
            f"{name}: expected all tensors on one device, got {', '.join(devices)}. Move them to one device."
        )


def is_built() -> bool:
    """Return whether a built ``zero_ext._C`` can be imported."""
    return importlib.util.find_spec(MODULE) is not None


@cache
def load() -> ModuleType:
    """Return the extension module; loading it registers the ops and their fake kernels.

    Raises:
        RuntimeError: torch is too old; or there is no built module, and building one failed or no compiler
            was found.
    """
    check_torch()
    if is_built():
        module = importlib.import_module(MODULE)
    else:
        # Imported late, like all that only a build needs.
        from zero_ext.ops.jit.jit_build import build_ops

        module = build_ops()
    if torch.version.cuda is not None:
        why_built_kernels_do_not_load()
    names = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    for name in (name for namespace, _, name in names if namespace == NAMESPACE):
        kernel = FAKE_KERNELS.get(name, partial(_fake_without_tensors, name))
        torch.library.register_fake(f"{NAMESPACE}::{name}", kernel)
    for name, (backward, setup_context) in AUTOGRAD_FORMULAS.items():
        torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context)
    return module


def check_torch() -> None:
    """Refuse a torch without the stable ABI that the modules are built for.

    Raises:
        RuntimeError: torch is older than 2.11.
    """
    major, minor = (int(number) for number in torch.__version__.split(".")[:2])
    if (major, minor) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise RuntimeError(
            f"torch: expected at least {oldest}, as the modules of zero_ext use its stable ABI, got "
            f"{torch.__version__}. Install a newer one with pip install 'torch>={oldest}'."
        )


@cache
def why_built_kernels_do_not_load() -> str:
    """Import the ``_C_cuda`` that came with the package; empty if it is loaded, else the reason.

    A module for another CUDA version is no error here: one for this torch may be built just in time.
    """
    if importlib.util.find_spec(CUDA_MODULE) is None:
        return "none came with this installation"
    try:
        importlib.import_module(CUDA_MODULE)
    except ImportError as error:
        return f"the one of this installation does not load: {error}"
    return ""


def kernels_are_loaded() -> bool:
    """Return whether the CUDA kernels are registered in this process."""
    return CUDA_MODULE in sys.modules


def load_kernels(device: torch.device) -> None:
    """Sees to it that the ops have their kernels for tensors on `device`.

    For a CUDA device that means module ``_C_cuda``, which is compiled now if the package came without it
    and the cache does not hold it: minutes, once. Ops do so themselves at the first CUDA tensor. For other
    devices it loads the ops and no more.

    Raises:
        RuntimeError: torch has no CUDA, there is no GPU, or the device's compute capability is below 8.0; or
            ``_C_cuda`` must be built and cannot be (no nvcc, one of another major version than torch's, no
            C++ compiler or one that nvcc refuses, a failed compilation, a cache folder that is not writable).
    """
    load()
    if device.type != "cuda":
        return
    if not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        raise RuntimeError(
            f"device {device}: expected a CUDA GPU, but torch.cuda.is_available() is False (torch "
            f"{torch.__version__} {built}). Use the CPU, or a machine and a torch with CUDA."
        )
    check_capability(device)
    if not kernels_are_loaded():
        from zero_ext.ops.jit.jit_build import build_kernels

        build_kernels(present_architectures())
        op.cache_clear()


def check_capability(device: torch.device) -> None:
    """Refuse a GPU for which there are no kernels. RuntimeError: naming it and its compute capability."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < OLDEST_ARCHITECTURE:
        name = torch.cuda.get_device_name(device)
        oldest = ".".join(map(str, OLDEST_ARCHITECTURE))
        raise RuntimeError(
            f"{device} ({name}): expected compute capability {oldest} or higher (A100 and later), which "
            f"the CUDA kernels of zero_ext need, got {major}.{minor}. Use such a GPU, or the CPU."
        )


def present_architectures() -> set[Architecture]:
    """Compute capabilities of the visible GPUs that the kernels can be built for; none without a GPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = {torch.cuda.get_device_capability(index) for index in range(count)}
    return {each for each in found if each >= OLDEST_ARCHITECTURE}


@cache
def op(name: str) -> Any:
    """Return the callable overload ``torch.ops.zero_ext.<name>.default``, with the extension loaded.

    While the CUDA kernels are not, it looks for CUDA tensors among its arguments and loads them then.
    """
    load()
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    if torch.version.cuda is None or kernels_are_loaded():
        return overload
    return partial(_call_with_kernels, overload)


@cache
def inplace(name: str) -> Any:
    """Return :func:`op`, which then raises the version counters of what it writes, as torch's own ops do.

    Ops that still write after they return do not use it.
    """
    call = op(name)
    arguments = getattr(getattr(torch.ops, NAMESPACE), name).default._schema.arguments
    written = [each.alias_info is not None and each.alias_info.is_write for each in arguments]

    def write(*values: Any) -> None:
        call(*values)
        torch.autograd.graph.increment_version([*_tensors_of(compress(values, written))])

    return write


def _call_with_kernels(overload: Any, *arguments: Any) -> Any:
    device = next((tensor.device for tensor in _tensors_of(arguments) if tensor.is_cuda), None)
    # Without a GPU such a tensor is a fake one, whose kernel is there.
    if device is not None and torch.cuda.is_available():
        load_kernels(device)
    return overload(*arguments)


def _tensors_of(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments and in their lists."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _tensors_of(argument)


ISA_NAMES: tuple[str, ...] = ("scalar", "avx2", "avx512", "avx512_bf16", "neon")


def get_isa() -> str:
    """Name of the instruction set in use; the widest of this machine until :func:`set_isa`."""
    return ISA_NAMES[op("cpu_dispatch_level")()]


def set_isa(name: str) -> str:
    """Make all kernels of this process use one of :data:`ISA_NAMES`; return the one used before.

    "neon" is the instruction set of 64-bit Arm, and all others but "scalar" are those of x86-64. Results are
    bit-identical with all of them, except in attention: "avx512_bf16" multiplies bfloat16 numbers in pairs,
    and AVX-512 keeps weights below 2^-126, which the others flush to zero. This exists for tests and
    measurements.

    Raises:
        ValueError: the name is unknown.
        RuntimeError: this machine lacks the instruction set.
    """
    if name not in ISA_NAMES:
        raise ValueError(
            f"instruction set: expected one of {', '.join(ISA_NAMES)}, got {name!r}. Choose one of them."
        )
    before = get_isa()
    op("set_cpu_dispatch_level")(ISA_NAMES.index(name))
    return before
