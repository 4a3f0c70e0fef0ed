"""CUDA and other accelerators of this machine, for ``zero-ext env``."""

from __future__ import annotations

import ctypes.util
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed

from zero_ext.cli.console import counted
from zero_ext.ops.jit import jit_build
from zero_ext.ops.jit.build_cache import cache_folder, cached_modules
from zero_ext.ops.jit.toolchain import WHEEL_ARCHITECTURES, installed_nvccs
from zero_ext.ops.load_library import (
    CUDA_MODULE,
    check_capability,
    kernels_are_loaded,
    load,
    present_architectures,
    why_built_kernels_do_not_load,
)

_NVIDIA_FS = Path("/proc/driver/nvidia-fs")
_CUFILE = "libcufile.so.0"


def describe_cuda(or_reason: Callable[[Callable[[], str]], str]) -> dict[str, str]:
    """Facts about the kernels and the libraries; `or_reason` words a fact that cannot be had."""
    return {
        "torch": f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA",
        "nvcc": or_reason(_nvcc),
        "kernels (_C_cuda)": or_reason(_kernels),
        "cache": or_reason(_cache),
        "NCCL": or_reason(_nccl),
        "GPUDirect Storage": or_reason(_cufile),
    }


def describe_accelerators(or_reason: Callable[[Callable[[], str]], str]) -> dict[str, str]:
    """Return what torch says of the devices it could compute on, each GPU by itself."""
    facts = {"torch.accelerator": or_reason(_accelerator)}
    if not torch.cuda.is_available():
        return facts | {"CUDA": "no GPU that torch can use"}
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        facts[str(device)] = or_reason(partial(_gpu, device))
    return facts


def _nvcc() -> str:
    found = installed_nvccs(torch.version.cuda)
    texts = [f"{release or 'of unknown version'}, {path}" for path, release in found.items()]
    return "; ".join(texts) or "none found"


def _kernels() -> str:
    """Return whether the CUDA kernels are there, and if not, whether they could be compiled."""
    load()
    if torch.version.cuda is None:
        return f"none, because torch {torch.__version__} is built without CUDA"
    if kernels_are_loaded():
        return f"loaded, {sys.modules[CUDA_MODULE].__file__}"
    why, gpus = why_built_kernels_do_not_load(), present_architectures()
    module = jit_build.cached_kernels(gpus or WHEEL_ARCHITECTURES)
    if module.is_complete():
        return f"in the cache, {module.path}; {why}"
    try:
        jit_build.cuda_recipe(jit_build.source_root(jit_build.CUDA_MODULE), gpus or WHEEL_ARCHITECTURES)
    except RuntimeError as error:
        return f"none, and they cannot be compiled: {error}; {why}"
    when = "the first use compiles them" if gpus else "no GPU here uses them; `zero-ext build` compiles them"
    return f"none yet: {when}; {why}"


def _cache() -> str:
    """Return the folder of the just-in-time builds and its content."""
    lines = [str(cache_folder())]
    for module in cached_modules():
        name = module.folder.relative_to(cache_folder())
        state = "" if module.is_complete() else ", damaged: built again at its next use"
        lines.append(f"{name}: {module.path.stat().st_size / 2**20:.1f} MiB{state}")
    return "\n".join(lines if len(lines) > 1 else [f"{lines[0]}, empty"])


def _nccl() -> str:
    if not torch.distributed.is_nccl_available():
        return "not in this torch"
    return ".".join(str(number) for number in torch.cuda.nccl.version())


def _cufile() -> str:
    """Return where the library is and whether the kernel's module is; the library is not loaded."""
    path = next((path for path in _cufile_paths() if path.exists()), None)
    name = str(path) if path is not None else ctypes.util.find_library("cufile")
    if name is None:
        return f"no: {_CUFILE} was not found"
    return f"{name}; kernel module nvidia-fs {'loaded' if _NVIDIA_FS.is_dir() else 'not loaded'}"


def _cufile_paths() -> list[Path]:
    """Return where wheels and the toolkit put the library."""
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    found = [path for folder in wheels for path in sorted(folder.glob(f"*/lib/{_CUFILE}"))]
    return [*found, Path("/usr/local/cuda/lib64") / _CUFILE]


def _accelerator() -> str:
    if not torch.accelerator.is_available():
        return "none"
    devices = counted(torch.accelerator.device_count(), "device")
    return f"{torch.accelerator.current_accelerator()}, {devices}"


def _gpu(device: torch.device) -> str:
    facts = torch.cuda.get_device_properties(device)
    try:
        check_capability(device)
        fit = ""
    except RuntimeError:
        fit = ", too old for the CUDA kernels"
    capability = f"compute capability {facts.major}.{facts.minor}{fit}"
    return f"{facts.name}, {capability}, {facts.total_memory / 2**30:.1f} GiB"
