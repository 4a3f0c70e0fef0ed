"""Where a result comes from: processor, memory, versions, commit, command."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "transformers", "deepspeed", "numpy")


def _first(path: str, field: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(field):
            return line.split(":", 1)[1].strip()
    return "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def _instruction_sets() -> str:
    flags = set(_first("/proc/cpuinfo", "flags").split())
    return " ".join(name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags)


def available_bytes() -> int:
    """MemAvailable: bytes this machine can still hand out without swapping."""
    return int(_first("/proc/meminfo", "MemAvailable").split()[0]) * 1024


def total_bytes() -> int:
    """MemTotal: bytes of this machine's memory."""
    return int(_first("/proc/meminfo", "MemTotal").split()[0]) * 1024


def describe() -> dict[str, str]:
    """Everything a reader needs to judge or repeat a run."""
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": f"python -m benchmarks.{Path(sys.argv[0]).stem} {shlex.join(sys.argv[1:])}".strip(),
        "commit": _commit(),
        "cpu": f"{_first('/proc/cpuinfo', 'model name')}, {os.cpu_count()} cores, {_instruction_sets()}",
        "memory": f"{total_bytes() / 2**30:.1f} GiB",
        "huge pages": huge_pages.read_text().strip() if huge_pages.exists() else "absent",
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
    }
