"""Builds and loads the fake libraries, and sets what goes wrong in them."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.accelerator.build import CACHE
from tests.accelerator.build import library as stand_in_library
from tests.accelerator.stand_in import is_enabled
from zero_ext.offload.nvme import gpu_direct_storage

SOURCE = Path(__file__).parent / "fake.cpp"
FLAGS = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC"]
CALLS = {"read": 0, "write": 1, "driver_open": 2, "handle_register": 3}


class Counts(NamedTuple):
    """What is open in the library, and the bytes it has moved."""

    drivers: int
    files: int
    bytes_read: int
    bytes_written: int


class FakeCuFile:
    """The fake cuFile library of this process, which whoever asks for libcufile.so.0 gets from now on: the
    loader finds what is loaded under that name. The calling thread has a CUDA context, as far as it goes."""

    def __init__(self) -> None:
        folder = built()
        driver = ctypes.CDLL(str(folder / "libcuda.so.1"))
        driver.cuCtxSetCurrent(ctypes.c_void_p(1))
        self._library = ctypes.CDLL(str(folder / "libcufile.so.0"))
        if is_enabled():
            self._library.fake_behind(ctypes.CDLL(str(stand_in_library())).stand_in_open_alias)
        gpu_direct_storage.MODULES = Path("/proc/self/status")  # the real one is not on every machine

    def fault(self, call: str, result: int, after: int = 0, times: int = 1) -> None:
        """Lets ``after`` calls pass, then has ``times`` end with ``result``; see fake.cpp."""
        self._library.fake_fault(CALLS[call], *map(ctypes.c_long, (after, result, times)))

    def counts(self) -> Counts:
        """See :class:`Counts`."""
        values = (ctypes.c_long * len(Counts._fields))()
        self._library.fake_counts(values)
        return Counts(*values)


@cache
def fake_cufile() -> FakeCuFile:
    """The library; loaded once a process."""
    return FakeCuFile()


def built() -> Path:
    """The folder of the libraries, built once for a state of their source; others wait."""
    digest = hashlib.sha256(" ".join(FLAGS).encode() + SOURCE.read_bytes()).hexdigest()[:16]
    folder = CACHE / f"cufile-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        driver, cufile = folder / "libcuda.so.1", folder / "libcufile.so.0"
        if not cufile.exists():
            _compile(driver, "-DFAKE_DRIVER")
            _compile(cufile, str(driver))
    return folder


def _compile(library: Path, *more: str) -> None:
    partial = library.with_suffix(".partial")
    soname = f"-Wl,-soname,{library.name}"
    subprocess.run(["g++", *FLAGS, soname, str(SOURCE), "-o", str(partial), *more], check=True)
    partial.rename(library)
