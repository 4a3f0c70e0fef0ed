"""Reads and writes of files that go on while the caller does: an engine a handle, a ticket a transfer."""

from __future__ import annotations

import atexit
from functools import cache

from torch import Tensor

from zero_ext.ops.load_library import fake_kernel, op


def aio_backends() -> dict[str, str]:
    """Why each backend is not available to this process, the preferred one first; "" if it is available."""
    lines = (line.partition(": ") for line in op("aio_backends")().splitlines())
    return {name: reason for name, _, reason in lines}


def aio_open(
    handle: int,
    backend: str = "auto",
    queue_depth: int = 32,
    block_bytes: int = 1 << 20,
    io_threads: int = 1,
) -> str:
    """Start an engine and return its backend: the one asked for, or with "auto" the first available.

    Args:
        handle: any number that this process has not in use; one in use is closed and stands for the new
            engine. Handles do not follow into forked children.
        backend: "io_uring", "libaio", "threads" or "auto".
        queue_depth: blocks that a thread has in flight at most, 1 to 1024.
        block_bytes: what transfers are cut into; a multiple of 4096, at most 1 GiB.
        io_threads: queues, each with a thread, that share the blocks; 1 to 16.

    Raises:
        RuntimeError: an option is out of range, or the kernel refuses the backend (its reason is named).
    """
    _close_all_at_exit()
    return str(op("aio_open")(handle, backend, queue_depth, block_bytes, io_threads))


def aio_close(handle: int) -> None:
    """Wait for the engine's transfers and end it; tickets that nobody waited for are forgotten."""
    op("aio_close")(handle)


def aio_close_all() -> None:
    """Close every engine of this process, as its exit does."""
    op("aio_close_all")()


def aio_read_(handle: int, ticket: int, path: str, offset: int, tensor: Tensor) -> None:
    """Begin to fill a contiguous CPU tensor, of any dtype, with the file's bytes from `offset`.

    `ticket` is any number; transfers of one engine may share it. The tensor is kept alive, and its content is
    undefined, until the ticket was waited for; it must not overlap that of another transfer, and
    the ranges of transfers to one file overlap only if each was waited for before the next. The file stays
    open for later transfers, past the page cache where file system and alignment allow.

    Raises:
        RuntimeError: the tensor's layout or the handle is wrong, or the file cannot be opened.
    """
    op("aio_read_")(handle, ticket, path, offset, tensor)


def aio_write_(handle: int, ticket: int, path: str, offset: int, tensor: Tensor) -> None:
    """Begin to write a contiguous CPU tensor, of any dtype, to the file at `offset`.

    A missing file is created, private to the user (0600). Otherwise as :func:`aio_read_`; the tensor must
    not change before the ticket was waited for.
    """
    op("aio_write_")(handle, ticket, path, offset, tensor)


def aio_wait(handle: int, ticket: int) -> None:
    """Return once every byte of the ticket's transfers has moved, and forget them; immediately if it has
    none.

    Raises:
        RuntimeError: a transfer failed; path, offset, length and the kernel's reason are named. No part of
            any of the ticket's transfers is under way any more.
    """
    op("aio_wait")(handle, ticket)


def aio_inject_fault(handle: int, writing: bool, after: int, result: int, times: int = 1) -> None:
    """For tests: lets `after` completed blocks of one direction pass, then changes the next `times`.

    `result` is what these are taken to have returned: a negative errno, or the bytes of a short transfer
    (0: the file has ended). EINTR, EAGAIN and short transfers are overcome, all others fail their ticket.
    """
    op("aio_inject_fault")(handle, writing, after, result, times)


@cache
def _close_all_at_exit() -> None:
    atexit.register(aio_close_all)


@fake_kernel("aio_backends")
def _aio_backends() -> str:
    return ""


@fake_kernel("aio_open")
def _aio_open(handle: int, backend: str, queue_depth: int, block_bytes: int, io_threads: int) -> str:
    return backend


@fake_kernel("aio_close")
def _aio_close(handle: int) -> None:
    return None


@fake_kernel("aio_close_all")
def _aio_close_all() -> None:
    return None


@fake_kernel("aio_read_")
def _aio_read_(handle: int, ticket: int, path: str, offset: int, tensor: Tensor) -> None:
    return None


@fake_kernel("aio_write_")
def _aio_write_(handle: int, ticket: int, path: str, offset: int, tensor: Tensor) -> None:
    return None


@fake_kernel("aio_wait")
def _aio_wait(handle: int, ticket: int) -> None:
    return None


@fake_kernel("aio_inject_fault")
def _aio_inject_fault(handle: int, writing: bool, after: int, result: int, times: int) -> None:
    return None
