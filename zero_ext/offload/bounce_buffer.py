"""Transfers between storage and an accelerator, chunk by chunk through pinned memory of fixed size."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from zero_ext.config.buffer_sizes import SLOTS
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.offload.device_memory import Device
from zero_ext.offload.side_stream import COMPLETED, CopyHandle

_FIRST = 4  # of ``SLOTS`` chunks are in their first stage, the others in their second

# Starts to move the bytes from an offset of a shard on, from or into memory that storage can access.
Move = Callable[[int, torch.Tensor], CopyHandle]


class DeviceTransferPath(Protocol):
    """Moves bytes between storage and an accelerator's memory, through ``nbytes`` of host memory."""

    nbytes: int

    def read(self, into: torch.Tensor, move: Move) -> CopyHandle:
        """Start to fill ``into``, device memory of whole blocks, by ``move``, which reads."""

    def write(self, values: torch.Tensor, move: Move) -> CopyHandle:
        """Start to bring ``values``, device memory of whole blocks, to storage by ``move``, which writes."""


class BounceBuffer:
    """A :class:`DeviceTransferPath` through ``nbytes`` of pinned memory, which are allocated here.

    Both directions run simultaneously, each through ``SLOTS`` chunks.

    A chunk passes two stages, storage and copy, in the one order or the other. The chunks of all transfers of
    a direction go one after another. They continue when a caller waits for an unfinished transfer.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        memory = device.allocate("host", nbytes, torch.uint8)
        size = nbytes // (2 * SLOTS)
        chunks = [memory[begin : begin + size] for begin in range(0, 2 * SLOTS * size, size)]
        self.nbytes = nbytes
        self._device = device
        self._reads = _SlotQueue(chunks[:SLOTS])
        self._writes = _SlotQueue(chunks[SLOTS:])

    def read(self, into: torch.Tensor, move: Move) -> CopyHandle:
        """See :class:`DeviceTransferPath`."""
        # The event is recorded now. A chunk may start while a caller waits for another transfer,
        # when the current stream has later work or is another stream.
        flat, after = into.view(torch.uint8), self._device.now()

        def start(begin: int, chunk: torch.Tensor) -> _ChunkCopy:
            target = flat[begin : begin + len(chunk)]
            return _ChunkCopy(move(begin, chunk), lambda: self._device.copy(target, chunk, after))

        return _BounceTransfer(self._reads, len(flat), start)

    def write(self, values: torch.Tensor, move: Move) -> CopyHandle:
        """See :class:`DeviceTransferPath`."""
        flat, after = values.view(torch.uint8), self._device.now()

        def start(begin: int, chunk: torch.Tensor) -> _ChunkCopy:
            copied = self._device.copy(chunk, flat[begin : begin + len(chunk)], after)
            return _ChunkCopy(copied, lambda: move(begin, chunk))

        return _BounceTransfer(self._writes, len(flat), start)


class _ChunkCopy(NamedTuple):
    """A chunk being transferred: its first stage, and what starts its second one."""

    first: CopyHandle
    then: Callable[[], CopyHandle]


class _SlotQueue:
    """Slots in turn, and the chunks in their first stage, in order."""

    def __init__(self, slots: Sequence[torch.Tensor]) -> None:
        self.slots = slots
        self._used: list[CopyHandle] = [COMPLETED] * len(slots)  # the second stage that used each last
        self._started: deque[tuple[int, _BounceTransfer, _ChunkCopy]] = deque()
        self._waiting: deque[tuple[_BounceTransfer, int, int]] = deque()  # [begin, end) in bytes
        self._next = 0

    def add(self, transfer: _BounceTransfer, begin: int, end: int) -> None:
        """Put a chunk at the end."""
        self._waiting.append((transfer, begin, end))
        if len(self._started) < _FIRST:
            self._start()

    def advance(self) -> None:
        """Bring the oldest chunk to its second stage, and the next one to its first."""
        slot, transfer, chunk = self._started.popleft()
        self._used[slot] = transfer.start_second_stage(chunk)
        if self._waiting:
            self._start()

    def _start(self) -> None:
        transfer, begin, end = self._waiting.popleft()
        slot, self._next = self._next, (self._next + 1) % len(self.slots)
        used, self._used[slot] = self._used[slot], COMPLETED
        # The slot's last chunk may still be read by its second stage.
        used.wait_source()
        self._started.append((slot, transfer, transfer.start(begin, self.slots[slot][: end - begin])))


class _BounceTransfer:
    """All chunks of one transfer: a :class:`CopyHandle`."""

    def __init__(
        self, queue: _SlotQueue, nbytes: int, start: Callable[[int, torch.Tensor], _ChunkCopy]
    ) -> None:
        self._queue = queue
        self._start: Callable[[int, torch.Tensor], _ChunkCopy] | None = start
        self._first: CopyHandle = COMPLETED  # the last one of each stage, which end in order
        self._second: list[CopyHandle] = []
        self._failure: RuntimeError | None = None
        size = queue.slots[0].nbytes
        self._open = self._unstarted = -(-nbytes // size)
        for begin in range(0, nbytes, size):
            queue.add(self, begin, min(begin + size, nbytes))

    def start(self, begin: int, chunk: torch.Tensor) -> _ChunkCopy:
        """Start the first stage of the bytes from ``begin`` on, in ``chunk``.

        :meth:`wait` raises the error of a chunk that cannot start: its transfer may not be the one that the
        caller waits for.
        """
        if self._start is None:
            raise zero_ext_bug(f"the chunk from byte {begin} on was started before")
        try:
            started = self._start(begin, chunk)
        except RuntimeError as error:
            self._failure = self._failure or error
            started = _ChunkCopy(COMPLETED, lambda: COMPLETED)
        self._first = started.first
        self._unstarted -= 1
        if self._unstarted == 0:
            # It references the memory that is read or written, which this handle need not keep alive.
            self._start = None
        return started

    def start_second_stage(self, chunk: _ChunkCopy) -> CopyHandle:
        """Start the second stage of a chunk, once the first one has ended; none after a failure."""
        self._open -= 1
        try:
            chunk.first.wait()
            self._second.append(chunk.then())
        except RuntimeError as error:
            self._failure = self._failure or error
            return COMPLETED
        return self._second[-1]

    def _start_all_second_stages(self) -> None:
        while self._open:
            self._queue.advance()

    def wait(self) -> None:
        self._start_all_second_stages()
        # All chunks are waited for, also after a failure, because the caller then releases their
        # memory.
        while self._second:
            try:
                self._second.pop(0).wait()
            except RuntimeError as error:
                self._failure = self._failure or error
        if self._failure is not None:
            raise self._failure

    def wait_source(self) -> None:
        self._start_all_second_stages()
        self._first.wait_source()

    def stream_context(self) -> contextlib.AbstractContextManager[object]:
        self._start_all_second_stages()
        if self._failure is not None:
            self.wait()  # for the later chunks too: a caller that aborts releases their memory
        # The second stage of a read is a copy. Copies of one direction share a stream, so work that
        # follows the last one follows all.
        return self._second[-1].stream_context()
