"""The way between storage and an accelerator: chunk by chunk through pinned memory of fixed size."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from zero_ext.config.buffer_sizes import SLOTS
from zero_ext.offload.device.device_memory import Device
from zero_ext.offload.device.side_stream import HERE, Arrival

_FIRST = 4  # of ``SLOTS`` chunks are in their first stage, the others in their second

# Starts to move the bytes from an offset of a home on, from or into memory that storage reaches.
Move = Callable[[int, torch.Tensor], Arrival]


class DeviceWay(Protocol):
    """How bytes get between storage and an accelerator's memory; ``nbytes`` of host memory lie on the way."""

    nbytes: int

    def read(self, into: torch.Tensor, move: Move) -> Arrival:
        """Starts to fill ``into``, device memory of whole blocks, by ``move``, which reads."""

    def write(self, values: torch.Tensor, move: Move) -> Arrival:
        """Starts to bring ``values``, device memory of whole blocks, to storage by ``move``, which writes."""


class Transit:
    """A :class:`DeviceWay`: moves bytes between storage and memory of ``device``, both ways at once, each
    through ``SLOTS`` chunks of pinned memory: ``nbytes``, allocated here.

    A chunk passes two stages, storage and copy, in the one order or the other. The chunks of all transfers of
    a direction go one after another; they go on when somebody waits for a transfer that is not through.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        memory = device.allocate("host", nbytes, torch.uint8)
        size = nbytes // (2 * SLOTS)
        chunks = [memory[begin : begin + size] for begin in range(0, 2 * SLOTS * size, size)]
        self.nbytes = nbytes
        self._device = device
        self._reads = _Line(chunks[:SLOTS])
        self._writes = _Line(chunks[SLOTS:])

    def read(self, into: torch.Tensor, move: Move) -> Arrival:
        """See :class:`DeviceWay`."""
        flat, after = into.view(torch.uint8), self._device.now()

        def start(begin: int, chunk: torch.Tensor) -> _Chunk:
            part = flat[begin : begin + len(chunk)]
            return _Chunk(move(begin, chunk), lambda: self._device.copy(part, chunk, after))

        return _Way(self._reads, len(flat), start)

    def write(self, values: torch.Tensor, move: Move) -> Arrival:
        """See :class:`DeviceWay`."""
        flat, after = values.view(torch.uint8), self._device.now()

        def start(begin: int, chunk: torch.Tensor) -> _Chunk:
            copied = self._device.copy(chunk, flat[begin : begin + len(chunk)], after)
            return _Chunk(copied, lambda: move(begin, chunk))

        return _Way(self._writes, len(flat), start)


class _Chunk(NamedTuple):
    """A chunk on its way: its first stage, and what starts its second one."""

    first: Arrival
    then: Callable[[], Arrival]


class _Line:
    """Slots in turn, and the chunks whose first stage is under way, in order."""

    def __init__(self, slots: Sequence[torch.Tensor]) -> None:
        self.slots = slots
        self._used: list[Arrival] = [HERE] * len(slots)  # the second stage that used each last
        self._started: deque[tuple[int, _Way, _Chunk]] = deque()
        self._waiting: deque[tuple[_Way, int, int]] = deque()  # first byte and the one after the last
        self._next = 0

    def add(self, way: _Way, begin: int, end: int) -> None:
        """Puts a chunk at the end."""
        self._waiting.append((way, begin, end))
        if len(self._started) < _FIRST:
            self._start()

    def advance(self) -> None:
        """Brings the oldest chunk to its second stage, and the next one to its first."""
        slot, way, chunk = self._started.popleft()
        self._used[slot] = way.carry_on(chunk)
        if self._waiting:
            self._start()

    def _start(self) -> None:
        way, begin, end = self._waiting.popleft()
        slot, self._next = self._next, (self._next + 1) % len(self.slots)
        used, self._used[slot] = self._used[slot], HERE
        used.let_go()
        self._started.append((slot, way, way.start(begin, self.slots[slot][: end - begin])))


class _Way:
    """All chunks of one transfer: an :class:`Arrival`."""

    def __init__(self, line: _Line, nbytes: int, start: Callable[[int, torch.Tensor], _Chunk]) -> None:
        self._line = line
        self._start: Callable[[int, torch.Tensor], _Chunk] | None = start
        self._first: Arrival = HERE  # the last one of each stage, which end in order
        self._second: list[Arrival] = []
        self._failure: RuntimeError | None = None
        size = line.slots[0].nbytes
        self._open = self._unstarted = -(-nbytes // size)
        for begin in range(0, nbytes, size):
            line.add(self, begin, min(begin + size, nbytes))

    def start(self, begin: int, chunk: torch.Tensor) -> _Chunk:
        """The first stage of the bytes from ``begin`` on, in ``chunk``. What cannot start is told by
        :meth:`wait`: it may be another transfer that is brought on here."""
        if self._start is None:
            raise AssertionError(f"the chunk from byte {begin} on was started before")
        try:
            started = self._start(begin, chunk)
        except RuntimeError as error:
            self._failure = self._failure or error
            started = _Chunk(HERE, lambda: HERE)
        self._first = started.first
        self._unstarted -= 1
        if self._unstarted == 0:
            # It holds the memory that is read or written; whoever keeps this way need not keep that.
            self._start = None
        return started

    def carry_on(self, chunk: _Chunk) -> Arrival:
        """The second stage of a chunk, once the first one has ended; none after a failure."""
        self._open -= 1
        try:
            chunk.first.wait()
            self._second.append(chunk.then())
        except RuntimeError as error:
            self._failure = self._failure or error
            return HERE
        return self._second[-1]

    def _carry_all_on(self) -> None:
        while self._open:
            self._line.advance()

    def wait(self) -> None:
        self._carry_all_on()
        while self._second:
            try:
                self._second.pop(0).wait()
            except RuntimeError as error:
                self._failure = self._failure or error
        if self._failure is not None:
            raise self._failure

    def let_go(self) -> None:
        self._carry_all_on()
        self._first.let_go()

    def followed(self) -> contextlib.AbstractContextManager[object]:
        self._carry_all_on()
        if self._failure is not None:
            self.wait()  # also for the chunks that come: whoever gives up gives their memory to others
        return self._second[-1].followed()
