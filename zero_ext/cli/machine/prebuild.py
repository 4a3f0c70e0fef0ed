"""The extension modules compiled ahead of their first use, on a login node or into an image, say."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from zero_ext.ops import load_storage_swap, torch_swaps_storages
from zero_ext.ops.jit.jit_build import STORAGE_MODULE, build_kernels
from zero_ext.ops.jit.toolchain import WHEEL_ARCHITECTURES, Architecture, architectures_listed
from zero_ext.ops.load_library import CUDA_MODULE, MODULE, kernels_are_loaded, load, present_architectures

OPTION = "--cuda-architectures"


def build_ahead(architectures: str | None) -> Iterator[tuple[str, str]]:
    """Build what is missing. Yield the name of each module with its path, or why there is none.

    Args:
        architectures: compute capabilities, like ``8.0,9.0``; None: those of the GPUs here, else the wheel's.

    Raises:
        ValueError: `architectures` is malformed, names one below 8.0, or cannot have an effect.
        RuntimeError: a module cannot be built.
    """
    wanted = None if architectures is None else _listed(architectures)
    yield MODULE, str(load().__file__)
    if not torch_swaps_storages():
        yield f"zero_ext.{STORAGE_MODULE}", str(load_storage_swap().__file__)
    if wanted is None and torch.version.cuda is None:
        yield CUDA_MODULE, f"none, because torch {torch.__version__} is built without CUDA"
        return
    if kernels_are_loaded():
        path = sys.modules[CUDA_MODULE].__file__
        if wanted is not None:
            raise ValueError(
                f"{OPTION}: expected an installation without kernels, got one with {path}. Leave the "
                "option out."
            )
        yield CUDA_MODULE, str(path)
        return
    kernels = build_kernels(wanted or present_architectures() or WHEEL_ARCHITECTURES)
    yield CUDA_MODULE, str(kernels.__file__)


def _listed(text: str) -> set[Architecture]:
    try:
        return architectures_listed(text)
    except ValueError as error:
        raise ValueError(f"{OPTION}: {error}") from None
