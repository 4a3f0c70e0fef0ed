"""Facts about this machine for bug reports and tuning, gathered without changing it."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from zero_ext import ops
from zero_ext.cli.machine.cuda_environment import describe_accelerators, describe_cuda
from zero_ext.offload import NvmeStore
from zero_ext.ops.jit import jit_build
from zero_ext.ops.load_library import is_built, load

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
