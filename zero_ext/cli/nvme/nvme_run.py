"""One pass over a file, read or written, by the I/O engine or by plain system calls, with its cost."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from zero_ext import ops
from zero_ext.checkpoint.files import raw_view

_BUFFERS = 4
_MIN_BUFFER_BYTES = 16 << 20
PLAIN_BLOCK = 1 << 20
_HANDLE = 0x7A65_726F


@dataclass(frozen=True)
class Setting:
    """An ``aio`` section: backend, bytes per block, blocks in flight per thread, I/O threads."""

    backend: str
    block_bytes: int
    queue_depth: int
    io_threads: int

    @property
    def in_flight_bytes(self) -> int:
        """Most bytes under way simultaneously."""
        return self.block_bytes * self.queue_depth * self.io_threads

    def section(self) -> dict[str, object]:
        """Return the section as the configuration spells it."""
        return {
            "backend": self.backend,
            "queue_depth": self.queue_depth,
            "block_bytes": self.block_bytes,
            "io_threads": self.io_threads,
        }


@dataclass(frozen=True)
class Cost:
    """Wall and processor seconds of one pass."""

    seconds: float
    processor_seconds: float


@dataclass(frozen=True)
class DeviceFile:
    """The first ``nbytes`` of a file that exists; not ``direct`` means through the page cache."""

    path: Path
    nbytes: int
    direct: bool

    def drop_page_cache(self) -> None:
        """Make the next read come from the device where the page cache stands between."""
        if not self.direct:
            with _opened(self.path, os.O_RDWR) as descriptor:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def sync_write(self) -> None:
        """Make a write that went into the page cache reach the device."""
        if not self.direct:
            with _opened(self.path, os.O_RDWR) as descriptor:
                os.fsync(descriptor)


def buffer_bytes(setting: Setting) -> int:
    """Return the bytes of a pass's four buffers. Three keep the queues full while one is replaced."""
    blocks = -(-max(_MIN_BUFFER_BYTES, -(-setting.in_flight_bytes // (_BUFFERS - 1))) // setting.block_bytes)
    return _BUFFERS * blocks * setting.block_bytes


def engine_pass(file: DeviceFile, setting: Setting, memory: Tensor, writing: bool) -> Cost:
    """Move the file once through the engine; ``memory`` (uint8) has at least :func:`buffer_bytes`.

    RuntimeError if the backend is not available or a transfer fails.
    """
    ops.aio_open(_HANDLE, setting.backend, setting.queue_depth, setting.block_bytes, setting.io_threads)
    try:
        with _measured(file, writing) as costs:
            _move(file, memory, buffer_bytes(setting) // _BUFFERS, writing)
        return costs[0]
    finally:
        ops.aio_close(_HANDLE)


def plain_pass(file: DeviceFile, memory: Tensor, writing: bool) -> Cost:
    """Move the file once with pread or pwrite, 1 MiB at a time in this thread."""
    view = raw_view(memory)[:PLAIN_BLOCK]
    flags = (os.O_WRONLY if writing else os.O_RDONLY) | (os.O_DIRECT if file.direct else 0)
    move = os.pwritev if writing else os.preadv
    with _opened(file.path, flags) as descriptor, _measured(file, writing) as costs:
        offset = 0
        while offset < file.nbytes:
            moved = move(descriptor, [view[: file.nbytes - offset]], offset)
            if moved == 0:
                raise RuntimeError(
                    f"'{file.path}': expected {file.nbytes} bytes, got {offset}: another process has "
                    "shortened it. "
                    "Run the measurement again."
                )
            offset += moved
    return costs[0]


def _move(file: DeviceFile, memory: Tensor, buffer: int, writing: bool) -> None:
    start = ops.aio_write_ if writing else ops.aio_read_
    for number, offset in enumerate(range(0, file.nbytes, buffer)):
        ticket = number % _BUFFERS
        ops.aio_wait(_HANDLE, ticket)
        length = min(buffer, file.nbytes - offset)
        start(_HANDLE, ticket, str(file.path), offset, memory[ticket * buffer : ticket * buffer + length])
    for ticket in range(_BUFFERS):
        ops.aio_wait(_HANDLE, ticket)


@contextmanager
def _measured(file: DeviceFile, writing: bool) -> Iterator[list[Cost]]:
    """Yield a list that gets the block's cost when it ends; reads start cold, writes end on the device."""
    costs: list[Cost] = []
    if not writing:
        file.drop_page_cache()
    begin, used = time.perf_counter(), time.process_time()
    yield costs
    if writing:
        file.sync_write()
    costs.append(Cost(time.perf_counter() - begin, time.process_time() - used))


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
