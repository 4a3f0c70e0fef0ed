"""Files of a checkpoint: its error, safe opening, one seam for all changes to the disk, buffers, a thread."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import queue
import reprlib
import shutil
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
MOST_BYTES = 2000
_GAP = " ... "
_TAIL_SHARE = 3


def shortened(text: str, most_bytes: int = MOST_BYTES) -> str:
    """Return `text` in at most `most_bytes` bytes of UTF-8: its beginning and its end, which says what to do.

    Names and values of a foreign file can be megabytes long.
    """
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= most_bytes:
        return data.decode()
    tail = most_bytes // _TAIL_SHARE
    head = most_bytes - tail - len(_GAP)
    return data[:head].decode("utf-8", "ignore") + _GAP + data[-tail:].decode("utf-8", "ignore")


def brief(value: object) -> str:
    """Return the beginning of ``repr(value)``, in time and memory that do not grow with the value."""
    return _brief.repr(value)


_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = _brief.maxlong = 77


class CheckpointError(RuntimeError):
    """A save or a load failed; the message names the rank, the file, what was seen and what to do.

    It is raised on every rank of the group, whichever rank met the problem.

    Args:
        text: the message; at most 2000 bytes of it are kept.
    """

    def __init__(self, text: str) -> None:
        super().__init__(shortened(text))


def open_regular(path: Path) -> int:
    """Return a descriptor to read ``path`` with; OSError, or CheckpointError if it is no regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(
            f"{path}: it is not a regular file. Put a regular file there, or pass another path."
        )
    return descriptor


def read_limited(path: Path, limit: int) -> bytes:
    """Return the file's bytes, ``limit`` of them at most; errors are those of ``open_regular``."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(limit)


DIRECT_ALIGNMENT = 4096


class Filesystem:
    """Files and directories of a checkpoint being written.

    ``block_bytes`` is the size of one large write. All methods raise OSError naming the path.
    """

    block_bytes = 8 << 20

    def make_directory(self, path: Path) -> None:
        """Make ``path`` and its missing parents; all of them survive a power cut."""
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            self.sync_directory(folder.parent)

    def create(self, path: Path) -> int:
        """Open a new file for writing, past the page cache where the file system allows; its descriptor."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        path.unlink(missing_ok=True)
        return os.open(path, flags, 0o644)

    def write(self, descriptor: int, data: memoryview, path: Path) -> None:
        """Write all of ``data``; continue after short writes."""
        if len(data) % DIRECT_ALIGNMENT:
            _use_page_cache(descriptor)
        try:
            while data:
                data = data[self._write_some(descriptor, data) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error

    def _write_some(self, descriptor: int, data: memoryview) -> int:
        try:
            written = os.write(descriptor, data)
        except OSError as error:
            # Some file systems accept the direct flag and refuse the write; a short write breaks alignment.
            if error.errno != errno.EINVAL or not _use_page_cache(descriptor):
                raise
            written = os.write(descriptor, data)
        if written == 0:
            raise OSError(errno.EIO, "the file system accepts no more bytes and gives no reason")
        return written

    def sync(self, descriptor: int, path: Path) -> None:
        """Wait until the file's bytes are on the disk."""
        try:
            os.fsync(descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error

    def sync_directory(self, path: Path) -> None:
        """Wait until the directory's entries are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sync(descriptor, path)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Move ``source`` over ``target`` in one step."""
        source.rename(target)

    def remove(self, path: Path) -> None:
        """Remove a file or a whole directory; nothing happens if there is none."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def write_file(self, path: Path, data: bytes) -> None:
        """Write a small file in one go; it is on the disk when this returns."""
        descriptor = self.create(path)
        try:
            self.write(descriptor, memoryview(data), path)
            self.sync(descriptor, path)
        finally:
            os.close(descriptor)


def _use_page_cache(descriptor: int) -> bool:
    """Leave direct I/O; False if the file was not in it."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not flags & os.O_DIRECT:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return True


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as uint8 [nbytes]."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def raw_view(data: torch.Tensor) -> memoryview:
    """Return a writable buffer over ``data`` (uint8 [n]); the caller keeps ``data`` alive meanwhile."""
    size = data.numel()
    if size == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * size).from_address(data.data_ptr())).cast("B")


def copy_bytes(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` (uint8 [n]) over ``destination`` (uint8 [n]) on this thread alone.

    torch's own copy would start worker threads of its own besides those of the training step.
    """
    if destination.numel() != source.numel():
        raise ValueError(
            f"destination: expected {source.numel()} bytes, the size of the source, got "
            f"{destination.numel()}. Pass buffers of one size."
        )
    if source.numel():
        ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.numel())


class IoThread:
    """A thread that runs submitted calls one after another; leaving the context waits for all of them.

    Executors of the standard library refuse work once the main thread has ended, and a save under way then
    still has to finish; this thread does not.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=False)

    def __enter__(self) -> IoThread:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._calls.put(None)
        self._thread.join()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queues ``call``; its result or exception arrives in the future."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
