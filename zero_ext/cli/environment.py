"""Facts about this machine for bug reports and tuning, and the extension modules compiled ahead of time."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import platform
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed

from zero_ext import ops
from zero_ext.cli.console import counted
from zero_ext.offload import NvmeStore
from zero_ext.ops.host_memory import load_storage_swap, torch_swaps_storages
from zero_ext.ops.jit import jit_build
from zero_ext.ops.jit.build_cache import cache_folder, cached_modules
from zero_ext.ops.jit.jit_build import STORAGE_MODULE, build_kernels
from zero_ext.ops.jit.toolchain import (
    WHEEL_ARCHITECTURES,
    Architecture,
    architectures_listed,
    installed_nvccs,
)
from zero_ext.ops.load_library import (
    CUDA_MODULE,
    MODULE,
    check_capability,
    is_built,
    kernels_are_loaded,
    load,
    present_architectures,
    why_built_kernels_do_not_load,
)

Section = dict[str, str]

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_UNLIMITED = 1 << 60
_NODES = Path("/sys/devices/system/node")

# Two ranks are children of one launcher, so is this pair: the first owns bytes, the second reads them.
_OWNER = """
import ctypes, sys
value = ctypes.create_string_buffer(b"zero_ext")
print(ctypes.addressof(value), flush=True)
sys.stdin.read()
"""
_READER = """
import ctypes, os, sys
class Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
libc = ctypes.CDLL(None, use_errno=True)
target = ctypes.create_string_buffer(8)
local, remote = Span(ctypes.addressof(target), 8), Span(int(sys.argv[2]), 8)
read = libc.process_vm_readv
read.restype = ctypes.c_ssize_t
read.argtypes = [ctypes.c_int] + 2 * [ctypes.c_void_p, ctypes.c_ulong] + [ctypes.c_ulong]
if read(int(sys.argv[1]), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) != 8:
    sys.exit(os.strerror(ctypes.get_errno()))
if target.raw != b"zero_ext":
    sys.exit("other bytes arrived")
"""


def describe_environment(folder: Path) -> dict[str, Section]:
    """Facts by section and name, as text; ``folder`` is on the file system to look at.

    A fact that cannot be had says why; nothing here raises for a machine in a bad state.
    """
    return {
        "versions": _versions(),
        "processor": _processor(),
        "memory": _memory(),
        "asynchronous I/O": _backends(),
        f"folder {folder}": _folder(folder),
        "exchange between ranks of a host": {"process_vm_readv": _or_reason(peer_memory)},
        "CUDA": describe_cuda(_or_reason),
        "accelerators": describe_accelerators(_or_reason),
    }


def _or_reason(find: Callable[[], str]) -> str:
    try:
        return find()
    except (OSError, RuntimeError, ValueError) as error:
        lines = str(error).splitlines()
        return f"unknown: {lines[0] if lines else type(error).__name__}"


def _versions() -> Section:
    try:
        own = version("zero_ext")
    except PackageNotFoundError:
        own = "not installed"
    return {
        "zero_ext": f"{own}, in {Path(__file__).resolve().parents[2]}",
        "torch": torch.__version__,
        "Python": f"{platform.python_version()}, {sys.executable}",
        "kernel": f"{platform.system()} {platform.release()}",
        "ops (_C)": _or_reason(_extension),
        "swap of storages": _or_reason(_storage_swap),
    }


def _extension() -> str:
    built = is_built()
    module = load()
    return f"{'built' if built else 'built just in time'}, {module.__file__}"


def _storage_swap() -> str:
    """Return its source, and what is missing to compile it where torch has none."""
    if ops.torch_swaps_storages():
        return "torch's own"
    module = jit_build.cached_storage_swap()
    if module.is_complete():
        return f"in the cache, {module.path}"
    jit_build.storage_recipe(jit_build.source_root(jit_build.STORAGE_MODULE))
    return "none yet: the first model that gathers parameters compiles _C_storage"


def _processor() -> Section:
    return {
        "model": _or_reason(lambda: _field(Path("/proc/cpuinfo"), "model name")),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} for this process",
        "torch threads": str(torch.get_num_threads()),
        "instruction set of the kernels": _or_reason(ops.get_isa),
    }


def _memory() -> Section:
    soft, hard = (
        "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"
        for limit in resource.getrlimit(resource.RLIMIT_MEMLOCK)
    )
    return {
        "total": _or_reason(lambda: _gibibytes(Path("/proc/meminfo"), "MemTotal")),
        "available": _or_reason(lambda: _gibibytes(Path("/proc/meminfo"), "MemAvailable")),
        "cgroup limit": _or_reason(_cgroup_limit),
        "transparent huge pages": _or_reason(lambda: (_HUGE_PAGES / "enabled").read_text().strip()),
        "locked memory (ulimit -l)": f"{soft} (may be raised to {hard})",
        "NUMA nodes": _or_reason(numa_nodes),
    }


def numa_nodes() -> str:
    """Return how many nodes with processors or memory of their own, and the processors of each."""
    nodes = sorted(_NODES.glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node")))
    texts = [f"{path.name}: {(path / 'cpulist').read_text().strip() or 'none'}" for path in nodes]
    return f"{len(nodes)}, processors of {'; '.join(texts)}" if nodes else "none in this process's view"


def _field(path: Path, name: str) -> str:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    raise ValueError(f"{path}: expected a field '{name}', got none. Check that /proc is mounted.")


def _gibibytes(path: Path, name: str) -> str:
    return f"{int(_field(path, name).split()[0]) / 2**20:.1f} GiB"


def _cgroup_limit() -> str:
    for path in _MEMORY_LIMITS:
        if path.exists():
            text = path.read_text().strip()
            return "none" if text == "max" or int(text) > _UNLIMITED else f"{int(text) / 2**30:.1f} GiB"
    return "none in this process's view"


def _backends() -> Section:
    try:
        reasons = ops.aio_backends()
    except RuntimeError as error:
        return {"backends": f"unknown: {str(error).splitlines()[0]}"}
    reasons["GPUDirect Storage (cuFile)"] = ops.cufile_unavailable_reason()
    return {name: f"not available: {why}" if why else "available" for name, why in reasons.items()}


def _folder(folder: Path) -> Section:
    return {
        "file system": _or_reason(lambda: file_system(folder)),
        "free": _or_reason(lambda: _free(folder)),
        "O_DIRECT": _or_reason(lambda: direct_transfers(folder)),
    }


def _free(folder: Path) -> str:
    facts = os.statvfs(folder)
    return f"{facts.f_bavail * facts.f_frsize / 2**30:.1f} GiB"


def direct_transfers(folder: Path) -> str:
    """Return whether a store in ``folder`` would pass by the page cache; tried with a file that is removed
    once.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        store = NvmeStore([folder])
    with store:
        reason = store.facts().devices[0].why_not_direct
        return f"no, through the page cache: {reason}" if reason else f"yes, by {store.alignment} bytes"


def file_system(folder: Path) -> str:
    """Type and source of the mount that holds ``folder``, by the device number of its files."""
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            kind, source, *_ = after.split()
            return f"{kind} on {source}"
    return f"of no mount listed (device {wanted})"


def peer_memory() -> str:
    """Return whether two processes of this user may read each other's memory, as ranks of one host do."""
    scope = f"; kernel.yama.ptrace_scope is {_YAMA.read_text().strip()}" if _YAMA.exists() else ""
    python = [sys.executable, "-I", "-S", "-c"]
    with subprocess.Popen(
        [*python, _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        address = owner.stdout.readline().strip() if owner.stdout else ""
        reader = subprocess.run(
            [*python, _READER, str(owner.pid), address],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    if reader.returncode == 0:
        return f"yes{scope}"
    return f"no, ranks go through gloo: {reader.stderr.strip() or 'the reader failed'}{scope}"


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
