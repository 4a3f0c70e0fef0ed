"""Tensors on NVMe: one file a device path, striped, removed when the process ends."""

from __future__ import annotations

import itertools
import logging
import os
import uuid
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from torch import Tensor

from zero_ext import ops
from zero_ext.config.events import Bus
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.offload.nvme.run_directory import RunDirectory
from zero_ext.offload.side_stream import CopyHandle

_log = logging.getLogger(__name__)


class NvmeStore:
    """Extents of bytes on the devices behind ``paths``, which CPU tensors are written to and read from, and
    after :meth:`open_direct` those of an accelerator too.

    Each path is an existing directory on a device of its own; the store keeps one private file in a
    :class:`RunDirectory` there. It is gone after ``close``, which the end of the ``with`` block, the garbage
    collector and the interpreter's exit call too, and after a crash once the next store on the path opens.
    The address space is striped over the paths, ``stripe_bytes`` at a time.

    With ``block_devices`` each path is a block device instead, which is overwritten. It is refused if
    anything uses it or if its first or last MiB holds anything but zeros or a crashed store's mark.

    The time spent waiting for transfers is published to ``bus``.

    Args:
        paths: one or more directories, or block devices.
        backend: 'io_uring', 'libaio', 'threads', or 'auto' for the best that works here; where that is not
            the first of these, a log line says why, once per process.
        queue_depth, block_bytes, io_threads: of the I/O engine: blocks in flight per thread, bytes per block
            (a multiple of 4096), and queues with a thread each.
        stripe_bytes: a multiple of :attr:`alignment`.
        checksum: keep the CRC32C of every 4096 bytes written (4 bytes of host memory each) and verify all
            that is read.
        reserve_bytes: as by :meth:`reserve`.
        block_devices: see above.

    Raises:
        RuntimeError: a path is missing, read-only, full, in use or listed twice, or the backend is not there.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        backend: str = "auto",
        queue_depth: int = 32,
        block_bytes: int = 1 << 20,
        io_threads: int = 1,
        stripe_bytes: int = 1 << 20,
        checksum: bool = False,
        reserve_bytes: int = 0,
        block_devices: bool = False,
    ) -> None:
        _check_distinct(paths)
        self._handle = uuid.uuid4().int >> 65
        self._tickets = itertools.count()
        self._direct = False
        self.row_bytes = stripe_bytes * len(paths)
        self.bus = Bus()
        # The finalizer shares this list, so it also removes what a constructor that fails has made.
        directories: list[RunDirectory] = []
        self._finalizer = weakref.finalize(self, _close, self._handle, directories, os.getpid())
        try:
            if not block_devices:
                for path in paths:
                    directories.append(RunDirectory(path))
            ops.store_open(
                self._handle,
                paths if block_devices else [directory.data_path for directory in directories],
                backend,
                (queue_depth, block_bytes, io_threads),
                stripe_bytes,
                checksum,
                block_devices,
            )
            facts = self.facts()
            self._alignment = facts.alignment
            if reserve_bytes > 0:
                self.reserve(reserve_bytes)
        except BaseException:
            self.close()
            raise
        _warn_of_buffered(facts)
        if backend == "auto":
            _log_fallback(facts.backend)

    @property
    def handle(self) -> int:
        """The number of this store for ops."""
        return self._handle

    @property
    def alignment(self) -> int:
        """Return what offsets and sizes of transfers are multiples of, in bytes."""
        return self._alignment

    def facts(self) -> ops.StoreFacts:
        """Paths, capacity and counters; see :class:`zero_ext.ops.StoreFacts`."""
        return ops.store_facts(self._handle)

    def reserve(self, nbytes: int, zeros: bool = True) -> None:
        """Raise the capacity to ``nbytes``, allocated and written with zeros: no later write finds it full.

        Without ``zeros`` it is only allocated, for what is written once. Raises RuntimeError with the path,
        the bytes asked for and the bytes free; nothing has changed then.
        """
        ops.store_reserve(self._handle, nbytes, zeros)

    def allocate(self, nbytes: int) -> int:
        """Return the offset of a new extent of ``nbytes``, rounded up to :attr:`alignment`.

        Raises RuntimeError if no free range of what was reserved is large enough.
        """
        return ops.store_allocate(self._handle, nbytes)

    def release(self, offset: int) -> None:
        """Free the extent at ``offset``; wait for its transfers first."""
        ops.store_release(self._handle, offset)

    def read(self, offset: int, tensor: Tensor) -> Transfer:
        """Start to fill ``tensor`` (contiguous, any dtype and shape) with the bytes from ``offset`` on.

        Its size is a multiple of :attr:`alignment`; it may lie anywhere inside one extent. Memory that the
        device cannot reach (see :func:`zero_ext.ops.host_buffer`) costs a pass through the page cache.
        """
        return self._start(ops.store_read_, ops.store_read_direct_, offset, tensor)

    def write(self, offset: int, tensor: Tensor) -> Transfer:
        """Start to write ``tensor``, which must not change until the transfer is complete; see ``read``."""
        return self._start(ops.store_write, ops.store_write_direct, offset, tensor)

    def open_direct(self) -> None:
        """Let :meth:`read` and :meth:`write` take tensors of the accelerator that is current in this thread,
        once what uses them has ended. RuntimeError as by :func:`zero_ext.ops.store_open_direct`."""
        ops.store_open_direct(self._handle)
        self._direct = True

    def close_direct(self) -> None:
        """End what :meth:`open_direct` began, after the transfers under way."""
        self._direct = False
        ops.store_close_direct(self._handle)

    def _start(
        self,
        from_host: Callable[[int, Tensor, int, int], None],
        direct: Callable[[int, Tensor, int, int], None],
        offset: int,
        tensor: Tensor,
    ) -> Transfer:
        on_host, ticket = tensor.device.type == "cpu", next(self._tickets)
        if not on_host and not self._direct:
            raise zero_ext_bug(f"a transfer of memory on {tensor.device}: it goes through the host's")
        (from_host if on_host else direct)(self._handle, tensor, offset, ticket)
        return Transfer(self._handle, ticket, self.bus)

    @property
    def is_open(self) -> bool:
        """Return whether :meth:`close` is still to come."""
        return self._finalizer.alive

    def close(self) -> None:
        """End all transfers and remove the files; calling it again does nothing."""
        self._finalizer()

    def __enter__(self) -> NvmeStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Transfer(CopyHandle):
    """A read or write under way. Each must be waited for: that is where failures are reported."""

    def __init__(self, handle: int, ticket: int, bus: Bus) -> None:
        self._handle = handle
        self._ticket = ticket
        self._bus = bus
        self._waited = False
        self._failure: RuntimeError | None = None

    def wait(self) -> None:
        """Return when every byte was transferred and, if asked for, verified; each call ends alike.

        Raises:
            RuntimeError: the transfer failed, with path, offset, length and the kernel's reason; or what was
                read is not what was written, with path, offset and the CRC32C expected and found.
        """
        if not self._waited:
            # A ticket's number may be used again once it was waited for, so the op is called only
            # once, and later calls repeat its outcome.
            self._waited = True
            began = self._bus.now()
            try:
                ops.store_wait(self._handle, self._ticket)
            except RuntimeError as error:
                self._failure = error
            self._bus.waited("storage", began)
        if self._failure is not None:
            raise self._failure


def _check_distinct(paths: Sequence[str | Path]) -> None:
    if isinstance(paths, (str, Path)):
        raise TypeError(
            f"paths: expected a sequence of paths, got {str(paths)!r}. Pass a list: [{str(paths)!r}]."
        )
    seen: set[Path] = set()
    for path in map(Path, paths):
        real = path.resolve()
        if real in seen:
            raise RuntimeError(f"nvme path '{path}': it is listed twice. List each device once.")
        seen.add(real)


def _warn_of_buffered(facts: ops.StoreFacts) -> None:
    for device in facts.devices:
        if device.why_not_direct:
            warnings.warn(
                f"'{device.path}' is read and written through the page cache, which takes memory besides the "
                f"state kept there: {device.why_not_direct}",
                RuntimeWarning,
                stacklevel=3,
            )


@cache
def _log_fallback(chosen: str) -> None:
    refused = [f"{name} is not available: {why}" for name, why in ops.aio_backends().items() if why]
    if refused:
        _log.warning("aio.backend 'auto' takes '%s' here; %s", chosen, "; ".join(refused))


def _close(handle: int, directories: list[RunDirectory], process: int) -> None:
    # A forked child has the finalizer too, but files and threads are its parent's.
    if os.getpid() != process:
        return
    ops.store_close(handle)
    for directory in directories:
        directory.close()
