"""Bytes on files or block devices, read and written asynchronously."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zero_ext.ops.load_library import fake_kernel, op


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


@fake_kernel("store_open")
def _store_open(
    handle: int,
    paths: list[str],
    backend: str,
    engine_sizes: list[int],
    stripe_bytes: int,
    checksum: bool,
    block_devices: bool,
) -> None:
    return None


@fake_kernel("store_reserve")
def _store_reserve(handle: int, nbytes: int, zeros: bool) -> None:
    return None


@fake_kernel("store_allocate")
def _store_allocate(handle: int, nbytes: int) -> torch.SymInt:
    return torch.library.get_ctx().new_dynamic_size()


@fake_kernel("store_release")
def _store_release(handle: int, offset: int) -> None:
    return None


@fake_kernel("store_read_")
def _store_read_(handle: int, tensor: Tensor, offset: int, ticket: int) -> None:
    return None


@fake_kernel("store_write")
def _store_write(handle: int, tensor: Tensor, offset: int, ticket: int) -> None:
    return None


@fake_kernel("cufile_unavailable_reason")
def _why_no_cufile() -> str:
    return ""


@fake_kernel("store_open_direct")
def _store_open_direct(handle: int) -> None:
    return None


@fake_kernel("store_close_direct")
def _store_close_direct(handle: int) -> None:
    return None


@fake_kernel("store_read_direct_")
def _store_read_direct_(handle: int, tensor: Tensor, offset: int, ticket: int) -> None:
    return None


@fake_kernel("store_write_direct")
def _store_write_direct(handle: int, tensor: Tensor, offset: int, ticket: int) -> None:
    return None


@fake_kernel("store_wait")
def _store_wait(handle: int, ticket: int) -> None:
    return None


@fake_kernel("store_devices")
def _store_devices(handle: int) -> str:
    return ""


@fake_kernel("store_stats_")
def _store_counts_(handle: int, counts: Tensor) -> None:
    return None


@fake_kernel("store_inject_fault")
def _store_inject_fault(handle: int, writing: bool, after: int, result: int, times: int) -> None:
    return None


@fake_kernel("store_close")
def _store_close(handle: int) -> None:
    return None
