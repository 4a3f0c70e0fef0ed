"""Where a result comes from: processor, memory, transport, versions, commit, command."""

import functools
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.harness.registered import ROOT

PACKAGES = ("torch", "transformers", "deepspeed", "numpy")
DIRTY = "-dirty"
UNKNOWN = "unknown"
# Runs of one session write results one after the other, and no other benchmark than the last reads them.
RESULTS_FOLDER = "benchmarks/results"


@dataclass(frozen=True)
class Start:
    """What a benchmark starts from: seconds of the clock, the tree's commit, the machine's load averages."""

    seconds: float
    commit: str
    load: str


def _first(path: str, field: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(field):
            return line.split(":", 1)[1].strip()
    return UNKNOWN


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def git(*arguments: str) -> str | None:
    """Output of a git command in the repository; None if it fails, or without git."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def changed_files() -> list[str]:
    """Tracked files that differ from HEAD and untracked ones that git does not ignore, without results."""
    status = git("status", "--porcelain", "--untracked-files=all", "--", ".", f":!{RESULTS_FOLDER}") or ""
    return [line[2:].strip() for line in status.splitlines()]


def commit() -> str:
    """Short hash of HEAD, with DIRTY behind it where `changed_files` has any; UNKNOWN outside of git."""
    head = git("rev-parse", "--short=10", "HEAD")
    return UNKNOWN if head is None else head + (DIRTY if changed_files() else "")


@functools.cache
def start() -> Start:
    """The start of this process's benchmark: the first call notes it."""
    return Start(time.monotonic(), commit(), " ".join(f"{each:.2f}" for each in os.getloadavg()))


def _instruction_sets() -> str:
    flags = set(_first("/proc/cpuinfo", "flags").split())
    return " ".join(name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags)


def _transport() -> str:
    from zero_ext.cli.environment import peer_memory

    found = peer_memory()
    direct = "direct reads between processes of one host, gloo where a row says so"
    return direct if found.startswith("yes") else f"gloo, because direct reads are refused: {found}"


def _threads() -> str:
    """Threads of this process. Ranks have those that the tables name."""
    torch = sys.modules.get("torch")
    own = f"torch {torch.get_num_threads()}" if torch else "torch not loaded"
    return f"{own}, OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'unset')}"


def available_bytes() -> int:
    """MemAvailable: bytes this machine can still hand out without swapping."""
    return int(_first("/proc/meminfo", "MemAvailable").split()[0]) * 1024


def total_bytes() -> int:
    """MemTotal: bytes of this machine's memory."""
    return int(_first("/proc/meminfo", "MemTotal").split()[0]) * 1024


def describe() -> dict[str, str]:
    """Everything a reader needs to judge or repeat a run; called at its end."""
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": f"python -m benchmarks.{Path(sys.argv[0]).stem} {shlex.join(sys.argv[1:])}".strip(),
        "commit": start().commit,
        "minutes": f"{(time.monotonic() - start().seconds) / 60:.1f}",
        "load averages at the start": start().load,
        "cpu": f"{_first('/proc/cpuinfo', 'model name')}, {os.cpu_count()} cores, {_instruction_sets()}",
        "threads": _threads(),
        "transport": _transport(),
        "memory": f"{total_bytes() / 2**30:.1f} GiB",
        "huge pages": huge_pages.read_text().strip() if huge_pages.exists() else "absent",
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
    }
