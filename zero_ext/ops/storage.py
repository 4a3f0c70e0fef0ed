"""Asynchronous reads and writes: of files (an engine a handle), and of stores striped over devices."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from zero_ext.ops.load_library import op


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


@dataclass(frozen=True)
class StoreDevice:
    """One path of a store; ``why_not_direct`` is empty if transfers go past the page cache."""

    path: Path
    why_not_direct: str


@dataclass(frozen=True)
class StoreFacts:
    """The parts of a store and what it has done; all sizes in bytes.

    ``live_bytes`` is the size of the allocated extents, ``largest_free`` that of the largest which fits.
    ``bytes_read`` and ``bytes_written`` count what ``store_read_`` and ``store_write`` were asked for; the
    zeros of ``store_reserve`` do not count.
    """

    backend: str
    devices: tuple[StoreDevice, ...]
    alignment: int
    capacity: int
    live_bytes: int
    bytes_read: int
    bytes_written: int
    largest_free: int


def store_open(
    handle: int,
    paths: Sequence[str | Path],
    backend: str,
    engine_sizes: tuple[int, int, int],
    stripe_bytes: int,
    checksum: bool,
    block_devices: bool,
) -> None:
    """Open a store striped over ``paths``: files to create (0600), or block devices to overwrite.

    ``handle`` is any number; a store open under it is closed first. ``backend`` is 'io_uring', 'libaio',
    'threads', or 'auto' for the best that works here. ``engine_sizes`` are queue_depth, block_bytes and
    I/O threads. ``checksum`` keeps the CRC32C of every 4096 bytes written and verifies what is read.

    Raises RuntimeError naming the path or the option, and the kernel's reason. A file that exists is refused,
    and so is a block device that is in use or has anything in its first or last MiB.
    """
    texts = [str(path) for path in paths]
    op("store_open")(handle, texts, backend, [*engine_sizes], stripe_bytes, checksum, block_devices)


def store_reserve(handle: int, nbytes: int, zeros: bool = True) -> None:
    """Raise the capacity to ``nbytes``; the space is allocated before it returns and, unless ``zeros``
    is False, written with zeros.

    Raises RuntimeError naming the path, the bytes asked for and the bytes free; nothing has changed then.
    """
    op("store_reserve")(handle, nbytes, zeros)


def store_allocate(handle: int, nbytes: int) -> int:
    """Return the offset of a new extent of ``nbytes``, rounded up to the alignment. RuntimeError if none is
    free.
    """
    return op("store_allocate")(handle, nbytes)


def store_release(handle: int, offset: int) -> None:
    """Free the extent at ``offset``. None of its transfers may be under way."""
    op("store_release")(handle, offset)


def store_read_(handle: int, tensor: Tensor, offset: int, ticket: int) -> None:
    """Start to fill a contiguous CPU tensor from ``offset``; it is complete once ``ticket`` was waited for.

    ``ticket`` is any number; transfers under one number are waited for together. Offset and size in bytes
    are multiples of the alignment and lie inside one extent, else RuntimeError.
    """
    op("store_read_")(handle, tensor, offset, ticket)


def store_write(handle: int, tensor: Tensor, offset: int, ticket: int) -> None:
    """Start to write a contiguous CPU tensor, which must not change before ``ticket`` was waited for.

    As for :func:`store_read_`.
    """
    op("store_write")(handle, tensor, offset, ticket)


def cufile_unavailable_reason() -> str:
    """Why NVIDIA's cuFile library cannot be loaded here; "" if it can. It starts neither it nor CUDA."""
    return str(op("cufile_unavailable_reason")())


def store_open_direct(handle: int) -> None:
    """Has :func:`store_read_direct_` and :func:`store_write_direct` go by cuFile (GPUDirect Storage), for the
    device that is current in this thread; opens its driver and registers the store's files with it.

    Raises RuntimeError with the loader's reason or cuFile's error numbers, or if the store keeps checksums.
    """
    op("store_open_direct")(handle)


def store_close_direct(handle: int) -> None:
    """Wait for what :func:`store_open_direct` made possible and end it; fine if it was not called."""
    op("store_close_direct")(handle)


def store_read_direct_(handle: int, tensor: Tensor, offset: int, ticket: int) -> None:
    """As :func:`store_read_`, for a tensor in the device's own memory.

    It starts immediately, whatever the device's streams hold: wait for what uses the tensor before.
    """
    op("store_read_direct_")(handle, tensor, offset, ticket)


def store_write_direct(handle: int, tensor: Tensor, offset: int, ticket: int) -> None:
    """As :func:`store_write`, for a tensor in the device's own memory; see :func:`store_read_direct_`."""
    op("store_write_direct")(handle, tensor, offset, ticket)


def store_wait(handle: int, ticket: int) -> None:
    """Return when the transfers under ``ticket`` are complete; the number may be used again then.

    Raises RuntimeError with path, offset, length and reason of the first that failed, or with the CRC32C
    expected and found; all have ended then too.
    """
    op("store_wait")(handle, ticket)


def store_facts(handle: int) -> StoreFacts:
    """Return what the store is made of and what it has done so far."""
    backend, *texts = op("store_devices")(handle).split("\0")[:-1]
    counts = torch.empty(6, dtype=torch.int64, device="cpu")
    op("store_stats_")(handle, counts)
    alignment, capacity, live_bytes, bytes_read, bytes_written, largest_free = counts.tolist()
    return StoreFacts(
        backend=backend,
        devices=tuple(
            StoreDevice(Path(path), why) for path, why in zip(texts[::2], texts[1::2], strict=True)
        ),
        alignment=alignment,
        capacity=capacity,
        live_bytes=live_bytes,
        bytes_read=bytes_read,
        bytes_written=bytes_written,
        largest_free=largest_free,
    )


def store_inject_fault(handle: int, writing: bool, after: int, result: int, times: int) -> None:
    """For tests: lets ``after`` blocks of one direction pass; the next ``times`` end as if the kernel had
    answered ``result``: -errno, or the number of bytes of a short transfer."""
    op("store_inject_fault")(handle, writing, after, result, times)


def store_close(handle: int) -> None:
    """Wait for all transfers and remove the store's files; a handle that is not open is fine."""
    op("store_close")(handle)


def crc32c(bytes: Tensor, seed: int = 0) -> int:
    """CRC32C of `bytes`, in [0, 2^32). The interpreter lock is released meanwhile.

    Args:
        bytes: uint8 [n], contiguous, on the CPU.
        seed: the checksum of the bytes before these; `crc32c(b, crc32c(a))` is that of a and b joined.

    Raises:
        RuntimeError: `bytes` has the wrong dtype, device or layout, or `seed` is out of range.

    Source: Castagnoli's polynomial as in RFC 3720, appendix B.4.
    """
    return op("crc32c")(bytes, seed)
