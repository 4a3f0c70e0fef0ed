"""``deepspeed.ops.aio``: asynchronous file I/O on the engine of ``zero_ext.ops.storage``.

Unlike DeepSpeed's, every result is checked: short transfers are continued, errors raise ``RuntimeError`` with
path, offset and reason.
"""

from __future__ import annotations

import itertools
import os
import secrets
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from zero_ext import ops
from zero_ext.integrations.deepspeed.import_alias import DeepSpeedFeatureError

_ALIGNMENT = 4096
_HANDLES = 2**62


class AsyncIOBuilder:
    """``AsyncIOBuilder().load().aio_handle(...)``; there is nothing to compile."""

    NAME = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return True: without io_uring and libaio threads do the work."""
        return True

    def load(self, verbose: bool = True) -> SimpleNamespace:
        """Return an object with ``aio_handle``, ``aio_read`` and ``aio_write``."""
        return SimpleNamespace(aio_handle=aio_handle, aio_read=aio_read, aio_write=aio_write)


def _fact(index: int, doc: str) -> Callable[[Any], int]:
    def get(self: aio_handle) -> int:
        return self._facts[index]

    get.__doc__ = doc
    return get


def _transfer(method: Callable[..., int], async_op: bool, doc: str) -> Callable[..., int]:
    def call(self: aio_handle, buffer: torch.Tensor, filename: str | int, file_offset: int = 0) -> int:
        return method(self, buffer, filename, False, async_op, file_offset)

    call.__doc__ = doc
    return call


class aio_handle:
    """One engine: blocks of ``block_size`` bytes, ``queue_depth`` of them in flight for each of
    ``intra_op_parallelism`` I/O threads. ``single_submit`` and ``overlap_events`` change nothing.

    Transfers take a contiguous CPU tensor and a path; ``wait`` ends those begun with ``async_`` and returns
    their number. Not for use by several threads simultaneously.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._facts = (block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        self._handle = secrets.randbelow(_HANDLES)
        self._tickets = itertools.count()
        self._pending: list[int] = []
        ops.aio_open(
            self._handle, queue_depth=queue_depth, block_bytes=block_size, io_threads=intra_op_parallelism
        )
        weakref.finalize(self, ops.aio_close, self._handle).atexit = False

    get_block_size = _fact(0, "Bytes that transfers are cut into.")
    get_queue_depth = _fact(1, "Blocks in flight per I/O thread.")
    get_single_submit = _fact(2, "As given.")
    get_overlap_events = _fact(3, "As given.")
    get_intra_op_parallelism = _fact(4, "Submitters.")

    def get_alignment(self) -> int:
        """Direct transfers want memory, offset and length in multiples of this; others work too."""
        return _ALIGNMENT

    def read(
        self, buffer: torch.Tensor, filename: str | int, validate: bool = False, file_offset: int = 0
    ) -> int:
        """Fill ``buffer`` from ``file_offset`` on; 1."""
        return self.pread(buffer, filename, validate, False, file_offset)

    def write(
        self, buffer: torch.Tensor, filename: str | int, validate: bool = False, file_offset: int = 0
    ) -> int:
        """Write ``buffer`` at ``file_offset``; 1."""
        return self.pwrite(buffer, filename, validate, False, file_offset)

    def pread(
        self,
        buffer: torch.Tensor,
        filename: str | int,
        validate: bool = False,
        async_op: bool = False,
        file_offset: int = 0,
    ) -> int:
        """Fill ``buffer``; with ``async_op`` begins to and return 0."""
        self._check_length(buffer, filename, file_offset)
        return self._begin(ops.aio_read_, buffer, filename, file_offset, async_op)

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: str | int,
        validate: bool = False,
        async_op: bool = False,
        file_offset: int = 0,
    ) -> int:
        """Write ``buffer``; with ``async_op`` begins to and return 0."""
        return self._begin(ops.aio_write_, buffer, filename, file_offset, async_op)

    sync_pread = _transfer(pread, False, "Fills ``buffer``; 1.")
    sync_pwrite = _transfer(pwrite, False, "Writes ``buffer``; 1.")
    async_pread = _transfer(pread, True, "Begins to fill ``buffer``; 0.")
    async_pwrite = _transfer(
        pwrite, True, "Begins to write ``buffer``, which must not change before :meth:`wait`; 0."
    )

    def wait(self) -> int:
        """End all transfers begun so far and return their number. Raises the first failure, once all
        have ended."""
        pending, self._pending = self._pending, []
        failure: RuntimeError | None = None
        for ticket in pending:
            try:
                ops.aio_wait(self._handle, ticket)
            except RuntimeError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return len(pending)

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor [num_elem] of the example's dtype, page-locked where there is CUDA."""
        pinned = torch.cuda.is_available()
        return torch.empty(num_elem, dtype=example_tensor.dtype, device="cpu", pin_memory=pinned)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Return True; the memory goes with the tensor."""
        return True

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is in page-locked memory."""
        return tensor.is_pinned()

    def _begin(
        self, transfer: object, buffer: torch.Tensor, filename: str | int, offset: int, async_op: bool
    ) -> int:
        if isinstance(filename, int):
            raise DeepSpeedFeatureError("aio_handle: expected a path, got an open file. Pass the path.")
        ticket = next(self._tickets)
        transfer(self._handle, ticket, os.fspath(filename), offset, buffer)  # type: ignore[operator]
        if async_op:
            self._pending.append(ticket)
            return 0
        ops.aio_wait(self._handle, ticket)
        return 1

    def _check_length(self, buffer: torch.Tensor, filename: str | int, offset: int) -> None:
        if isinstance(filename, int):
            return
        there = Path(filename).stat().st_size - offset
        if there < buffer.nbytes:
            raise RuntimeError(
                f"{filename}: expected {buffer.nbytes} bytes from offset {offset} on, got {max(there, 0)}. "
                "Read fewer."
            )


def aio_read(buffer: torch.Tensor, filename: str | int, block_size: int, queue_depth: int, *_: object) -> int:
    """Fill ``buffer`` from the beginning of a file; 1."""
    return aio_handle(block_size, queue_depth).read(buffer, filename)


def aio_write(
    buffer: torch.Tensor, filename: str | int, block_size: int, queue_depth: int, *_: object
) -> int:
    """Write ``buffer`` to the beginning of a file; 1."""
    return aio_handle(block_size, queue_depth).write(buffer, filename)
