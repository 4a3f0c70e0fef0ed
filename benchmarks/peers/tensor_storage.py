"""Where tensors can lie on a device: in one arena file, in a file each, on a block device under an arena."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from torch import Tensor

from zero_ext import ops
from zero_ext.cli.nvme_sweep import Setting
from zero_ext.offload import NvmeStore

HANDLE = 0x7065_7266


class TensorStorage(Protocol):
    """Room for tensors by their number; `start` returns what waits for the transfer."""

    def start(self, number: int, tensor: Tensor, writing: bool) -> Callable[[], None]: ...


class Arena:
    """Exact extents of one store, for tensors of the given sizes in bytes."""

    def __init__(self, store: NvmeStore, sizes: Sequence[int]) -> None:
        self._store = store
        self._offsets = [store.allocate(size) for size in sizes]

    def start(self, number: int, tensor: Tensor, writing: bool) -> Callable[[], None]:
        move = self._store.write if writing else self._store.read
        return move(self._offsets[number], tensor).wait


class FilePerTensor:
    """A file for each tensor, through the same I/O engine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tickets = itertools.count()

    def start(self, number: int, tensor: Tensor, writing: bool) -> Callable[[], None]:
        move, ticket = ops.aio_write_ if writing else ops.aio_read_, next(self._tickets)
        move(HANDLE, ticket, str(self._folder / f"{number}.bin"), 0, tensor)
        return lambda: ops.aio_wait(HANDLE, ticket)


@contextmanager
def arena(folder: Path, sizes: Sequence[int], setting: Setting) -> Iterator[TensorStorage]:
    """A store in a file below `folder`, its space reserved."""
    with _store(folder, setting, sizes) as store:
        yield Arena(store, sizes)


@contextmanager
def file_per_tensor(folder: Path, sizes: Sequence[int], setting: Setting) -> Iterator[TensorStorage]:
    """No files yet; they appear with the first write."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="aio-benchmark-") as name:
        ops.aio_open(HANDLE, setting.backend, setting.queue_depth, setting.block_bytes, setting.io_threads)
        try:
            yield FilePerTensor(Path(name))
        finally:
            ops.aio_close(HANDLE)


@contextmanager
def block_device(folder: Path, sizes: Sequence[int], setting: Setting) -> Iterator[TensorStorage]:
    """A store on a loop device over a reserved file below `folder`; see :func:`why_no_loop_device`."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="aio-benchmark-") as name:
        image = Path(name) / "image"
        with image.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _capacity(sizes) + (4 << 20))
        device = _losetup("--find", "--show", "--direct-io=on", str(image))
        try:
            with _store(device, setting, sizes, block_devices=True) as store:
                yield Arena(store, sizes)
        finally:
            _losetup("--detach", device)


def why_no_loop_device() -> str:
    """The reason why this process cannot have a loop device, "" if it can."""
    if shutil.which("losetup") is None:
        return "losetup is not installed"
    try:
        _losetup("--find")
    except RuntimeError as error:
        return str(error)
    return "" if os.geteuid() == 0 else "only root may attach a loop device"


def _losetup(*arguments: str) -> str:
    done = subprocess.run(["losetup", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"losetup {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def _store(
    path: str | Path, setting: Setting, sizes: Sequence[int], block_devices: bool = False
) -> NvmeStore:
    return NvmeStore(
        [path],
        setting.backend,
        setting.queue_depth,
        setting.block_bytes,
        setting.io_threads,
        stripe_bytes=1 << 20,
        reserve_bytes=_capacity(sizes),
        block_devices=block_devices,
    )


def _capacity(sizes: Sequence[int]) -> int:
    page = 4096
    return sum(-(-size // page) * page for size in sizes)
