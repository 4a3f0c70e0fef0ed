"""Optimizer state on NVMe, streamed through one ring of memory or chunk by chunk in Python."""

from __future__ import annotations

import contextlib
import uuid
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch

from zero_ext import ops
from zero_ext.config import Tier
from zero_ext.config.buffer_sizes import CHUNK_BUFFERS, STORAGE_ALIGNMENT
from zero_ext.config.events import Bus
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.offload.nvme.nvme_store import NvmeStore, Transfer
from zero_ext.offload.optimizer_state_storage import MASTER, OptimizerStateStorage, StateField
from zero_ext.offload.shard_storage import NvmeShard, ShardStorage, StorageRange, TransferStats, Values

_READ, _WRITTEN = (ops.STREAM_COUNTERS.index(name) for name in ("bytes_read", "bytes_written"))
_WAITING = [ops.STREAM_COUNTERS.index(f"nanoseconds_waiting_for_{what}") for what in ("reads", "writes")]


class StateStream:
    """The ring, and the kinds of state that pass through it: ``kinds``, besides the master weights.

    ``staging_buffer_bytes`` of memory are allocated here. The time spent waiting for storage is published to
    ``bus``. Raises ``RuntimeError`` naming the smallest ring if it is too small.
    """

    def __init__(
        self,
        store: NvmeStore,
        staging_buffer_bytes: int,
        kinds: Mapping[str, StateField],
        transfers: TransferStats,
        bus: Bus | None = None,
    ) -> None:
        self.store = store
        self.kinds = {MASTER: StateField(torch.float32), **kinds}
        self.handle = uuid.uuid4().int >> 65
        self.staging_buffer_bytes = staging_buffer_bytes
        self.transfers = transfers
        self._bus = Bus() if bus is None else bus
        sizes = [field.dtype.itemsize for field in self.kinds.values()]
        elements = [field.elements for field in self.kinds.values()]
        ops.state_stream_open(self.handle, store.handle, staging_buffer_bytes, sizes, elements)
        weakref.finalize(self, ops.state_stream_close, self.handle)
        self.chunk_elements = ops.state_stream_chunk_elements(self.handle)
        self.chunk_bytes = self.extent_bytes(self.chunk_elements)

    def extent_bytes(self, numel: int) -> int:
        """Return bytes in the store of the state of ``numel`` elements."""
        return ops.state_stream_extent_bytes(self.handle, numel)

    @contextlib.contextmanager
    def counters(self) -> Iterator[torch.Tensor]:
        """Return a buffer for an op's counters. Record the bytes it moved and publish the time it waited."""
        began = self._bus.now()
        counters = torch.zeros(len(ops.STREAM_COUNTERS), dtype=torch.int64, device="cpu")
        yield counters
        self.transfers.record("nvme", "host", int(counters[_READ]))
        self.transfers.record("host", "nvme", int(counters[_WRITTEN]))
        self._bus.waited("storage", began, int(counters[_WAITING].sum()) * 1e-9)


class NvmeState(OptimizerStateStorage):
    """State of ``numel`` elements in one extent of the store.

    With ``shadow`` there is a second extent, so that a step can be rolled back: it reads from ``offset`` and
    writes to ``target``, and the current state is the choice between the two.
    """

    tier: Tier = "nvme"

    def __init__(self, stream: StateStream, numel: int, shadow: bool = False) -> None:
        self.stream = stream
        self.numel = numel
        self.offset = stream.store.allocate(stream.extent_bytes(numel))
        self.target = self.offset
        self._shadow = stream.store.allocate(stream.extent_bytes(numel)) if shadow else None

    def add(self, kind: str, field: StateField) -> None:
        """Check that a kind is one of the stream. Its state is zero from the start."""
        if self.stream.kinds.get(kind) != field:
            raise zero_ext_bug(f"state '{kind}' as {field} is not among {self.stream.kinds}")

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield the chunks that move in one transfer."""
        for begin in range(0, self.numel, self.stream.chunk_elements):
            yield begin, min(begin + self.stream.chunk_elements, self.numel)

    def read(self, kind: str, begin: int, end: int) -> torch.Tensor:
        return self.read_kinds([kind], begin, end)[0]

    def read_kinds(
        self, kinds: Sequence[str], begin: int, end: int, into: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Return copies, in ``into`` if given."""
        fields = [self.stream.kinds[kind] for kind in kinds]
        values = list(into or ()) or [
            torch.empty(field.entries(end - begin), dtype=field.dtype, device="cpu") for field in fields
        ]
        with self.stream.counters() as counters:
            ops.state_stream_read_(
                self.stream.handle, self.offset, self.numel, begin, end, self._fields(kinds), values, counters
            )
        return values

    def write_kinds(self, kinds: Sequence[str], begin: int, end: int, values: Sequence[torch.Tensor]) -> None:
        """Replace several kinds, from memory of any device.

        Between :meth:`snapshot` and :meth:`commit` or :meth:`rollback` all of a state must be replaced.
        """
        values = [value.cpu() for value in values]
        with self.stream.counters() as counters:
            ops.state_stream_write_(
                self.stream.handle, self.target, self.numel, begin, end, self._fields(kinds), values, counters
            )

    def view(self, kind: str, begin: int, end: int) -> Values:
        return StorageRange(
            begin,
            end - begin,
            self.stream.kinds[kind].dtype,
            lambda first, last: self.read(kind, first, last),
            lambda first, values: self.write_kinds([kind], first, first + values.numel(), [values]),
        )

    def snapshot(self) -> None:
        """Make the step write to the other extent. Nothing is copied."""
        if self._shadow is None:
            raise zero_ext_bug("no extent was reserved for state after a step that may be rolled back")
        self.target = self._shadow

    def commit(self) -> None:
        """Swap the extents."""
        if self.target != self.offset:
            self._shadow, self.offset = self.offset, self.target

    def rollback(self) -> None:
        self.target = self.offset

    def allocated_bytes(self) -> int:
        """Return the bytes in the store with padding to full blocks, without the ring."""
        return self.stream.extent_bytes(self.numel) * (1 if self._shadow is None else 2)

    def extent(self, begin: int, end: int) -> StateExtent:
        """Return the state of the elements [begin, end) in the store; ``begin`` is a multiple of the stream's
        ``chunk_elements``, and so is ``end`` or it is the range's."""
        before = begin // self.stream.chunk_elements * self.stream.chunk_bytes
        return StateExtent(self.stream, end - begin, self.offset + before, self.target + before)

    def _fields(self, kinds: Sequence[str]) -> list[int]:
        order = list(self.stream.kinds)
        return [order.index(kind) for kind in kinds]


class StateExtent(NamedTuple):
    """The state of ``numel`` elements in the store: at ``offset``, and after a step at ``target``."""

    stream: StateStream
    numel: int
    offset: int
    target: int


class AdamWork(NamedTuple):
    """One step of one range: its gradient [n], element ranges and the hyper-parameters of each, as
    of :func:`zero_ext.ops.adam_step_`. Gradient and output are in storage or in host memory."""

    state: StateExtent
    gradient: ShardStorage
    output: ShardStorage | None
    bounds: Sequence[tuple[int, int]]
    rows: Sequence[Sequence[float]]


def stream_adam(
    works: Sequence[AdamWork], scale: torch.Tensor, non_finite: torch.Tensor | None = None
) -> None:
    """Make one Adam step over all ``works``, which share one stream, as one pipeline.

    Reads, updates and writes of different chunks are in flight simultaneously. ``non_finite`` is the flag of
    :func:`zero_ext.ops.adam_step_`.
    """
    ranges: list[list[int]] = []
    gradients: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    bounds: list[tuple[int, int]] = []
    rows: list[Sequence[float]] = []
    for work in works:
        source, gradient = _location_of(work.gradient)
        target, output = _location_of(work.output)
        moved = work.state.target if work.state.target != work.state.offset else -1
        ranges.append([work.state.numel, work.state.offset, source, target, len(work.bounds), moved])
        gradients.append(gradient)
        outputs.append(output)
        bounds += work.bounds
        rows += work.rows
    # State with another target moves there as a whole, also if no element of it is updated, because
    # a commit makes the target the current state.
    if not bounds and all(work.state.target == work.state.offset for work in works):
        return
    stream = works[0].state.stream
    with stream.counters() as counters:
        ops.state_stream_adam_(
            stream.handle,
            torch.tensor(ranges, dtype=torch.int64, device="cpu"),
            outputs,
            gradients,
            torch.tensor(bounds, dtype=torch.int64, device="cpu").view(-1, 2),
            torch.tensor(rows, dtype=torch.float64, device="cpu").view(-1, 8),
            scale,
            counters,
            non_finite,
        )


def _location_of(shard: ShardStorage | None) -> tuple[int, torch.Tensor]:
    """Offset in the store, or -1, and the memory or an empty tensor of the stored dtype."""
    if shard is None:
        return -1, torch.empty(0, device="cpu")
    if isinstance(shard, NvmeShard):
        return shard.offset, torch.empty(0, dtype=shard.dtype, device="cpu")
    memory = shard.memory(shard.tier)
    if memory is None:
        raise zero_ext_bug(f"a shard in tier '{shard.tier}' that is neither in memory nor in a store")
    return -1, memory


@dataclass
class StateChunk:
    """Elements [begin, end) of the range ``index``: their ``values`` of ``kinds``, which may be changed.

    Who changes them sets ``changed``; else they are not written back, unless all of the state moves.
    """

    index: int
    state: NvmeState
    begin: int
    end: int
    kinds: Sequence[str]
    first_byte: int  # of the values that move, in the extent of the chunk
    nbytes: int
    revisited: bool = False  # all of it moved in the step before: it is where that wrote it
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    changed: bool = False


def visit_chunks(
    stream: StateStream,
    states: Sequence[tuple[int, NvmeState]],
    buffers: Sequence[torch.Tensor],
    kind: str | None = None,
    ranges: Mapping[int, Sequence[tuple[int, int]]] = MappingProxyType({}),
) -> Generator[StateChunk]:
    """Yield every chunk of ``states``, which come with their index, in order; their kinds have a value an
    element. While one is worked on the next is read and the last, if it was changed, written.

    ``buffers`` are ``CHUNK_BUFFERS`` of ``stream.chunk_bytes`` bytes. With ``kind`` its values alone move
    where they are whole blocks, for steps that visit each kind in turn, the master weights last. ``ranges``
    of elements, ascending, come with the index of their state. Chunks without an element in them are left out
    unless all of the state moves. Raises ``RuntimeError`` if a transfer failed; none is in flight once the
    iterator has ended or was closed.
    """
    chunks = [
        _chunk(stream, index, state, *span, kind)
        for index, state in states
        for span in state.spans()
        if state.target != state.offset or _touches(span, ranges.get(index))
    ]
    reads: deque[Transfer] = deque()
    writes: deque[Transfer | None] = deque()

    def start(number: int, writing: bool) -> Transfer:
        return _start(stream, chunks[number], memory(number), writing)

    def memory(number: int) -> torch.Tensor:
        return buffers[number % CHUNK_BUFFERS][: chunks[number].nbytes]

    try:
        for number, chunk in enumerate(chunks):
            if number == 0:
                reads.append(start(number, writing=False))
            if number + 1 < len(chunks):
                # The next chunk is read into the buffer of the oldest write. A chunk that is not
                # written has an entry too, so that the length of the queue says which buffers are
                # free.
                if len(writes) == CHUNK_BUFFERS - 1:
                    _wait(writes.popleft())
                reads.append(start(number + 1, writing=False))
            reads.popleft().wait()
            chunk.changed = chunk.state.target != chunk.state.offset
            chunk.values = _values(stream, chunk, memory(number))
            yield chunk
            writes.append(start(number, writing=True) if chunk.changed else None)
        while writes:
            _wait(writes.popleft())
    finally:
        for transfer in (*reads, *writes):
            with contextlib.suppress(RuntimeError):  # after another error, which is the one to raise
                _wait(transfer)


def _touches(span: tuple[int, int], ranges: Sequence[tuple[int, int]] | None) -> bool:
    if ranges is None:
        return True
    first = bisect_right(ranges, span[0], key=lambda each: each[1])
    return first < len(ranges) and ranges[first][0] < span[1]


def _chunk(
    stream: StateStream, index: int, state: NvmeState, begin: int, end: int, kind: str | None
) -> StateChunk:
    kinds, numel, first = list(stream.kinds), end - begin, 0
    for other, entry in stream.kinds.items() if kind is not None else ():
        nbytes = numel * entry.dtype.itemsize
        if other == kind and not (first | nbytes) % STORAGE_ALIGNMENT:
            return StateChunk(index, state, begin, end, [kind], first, nbytes)
        first += nbytes
    return StateChunk(index, state, begin, end, kinds, 0, stream.extent_bytes(numel), kind == MASTER)


def _start(stream: StateStream, chunk: StateChunk, memory: torch.Tensor, writing: bool) -> Transfer:
    extent = chunk.state.extent(chunk.begin, chunk.end)
    if writing:
        stream.transfers.record("host", "nvme", memory.nbytes)
        return stream.store.write(extent.target + chunk.first_byte, memory)
    stream.transfers.record("nvme", "host", memory.nbytes)
    source = extent.target if chunk.revisited else extent.offset
    return stream.store.read(source + chunk.first_byte, memory)


def _values(stream: StateStream, chunk: StateChunk, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    values, first = {}, 0
    for kind in chunk.kinds:
        entry = stream.kinds[kind]
        if entry.elements != 1:
            raise zero_ext_bug(f"'{kind}' has an entry for {entry.elements} elements")
        last = first + (chunk.end - chunk.begin) * entry.dtype.itemsize
        values[kind] = buffer[first:last].view(entry.dtype)
        first = last
    return values


def _wait(transfer: Transfer | None) -> None:
    if transfer is not None:
        transfer.wait()
