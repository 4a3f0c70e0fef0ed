"""Optimizer state on NVMe chunk by chunk in Python: read ahead of need and written behind it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Sequence
from typing import NamedTuple

import torch

from zero_ext.config.buffer_sizes import CHUNK_BUFFERS
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.offload.nvme.nvme_state_stream import NvmeState, StateStream
from zero_ext.offload.nvme.nvme_store import Transfer


class StateChunk:
    """Elements [begin, end) of the range ``index``: their ``values`` by kind, memory that may be changed.

    Who changes them sets ``changed``; else they are not written back, unless all of the state ``moves``.
    """

    def __init__(
        self, index: int, begin: int, end: int, values: dict[str, torch.Tensor], moves: bool
    ) -> None:
        self.index = index
        self.begin = begin
        self.end = end
        self.values = values
        self.changed = moves


class _ChunkExtent(NamedTuple):
    owner: int
    state: NvmeState
    begin: int
    end: int


def visit_chunks(
    stream: StateStream, states: Sequence[tuple[int, NvmeState]], buffers: Sequence[torch.Tensor]
) -> Generator[StateChunk]:
    """Yield every chunk of ``states``, which come with their index, in order; their kinds have a value an
    element. While one is worked on the next is read and the last, if it was changed, written.

    ``buffers`` are ``CHUNK_BUFFERS`` of ``stream.chunk_bytes`` bytes. Raises ``RuntimeError`` if a transfer
    failed; none is in flight once the iterator has ended or was closed.
    """
    extents = [_ChunkExtent(index, state, *span) for index, state in states for span in state.spans()]
    reads: deque[Transfer] = deque()
    writes: deque[Transfer | None] = deque()

    def memory(number: int) -> torch.Tensor:
        extent = extents[number]
        return buffers[number % CHUNK_BUFFERS][: stream.extent_bytes(extent.end - extent.begin)]

    try:
        for number, extent in enumerate(extents):
            if number == 0:
                reads.append(_start(stream, extent, memory(number), writing=False))
            if number + 1 < len(extents):
                # The next chunk is read into the buffer of the oldest write. A chunk that is not
                # written has an entry too, so that the length of the queue says which buffers are
                # free.
                if len(writes) == CHUNK_BUFFERS - 1:
                    _wait(writes.popleft())
                reads.append(_start(stream, extents[number + 1], memory(number + 1), writing=False))
            reads.popleft().wait()
            moves = extent.state.target != extent.state.offset
            values = _values(stream, extent, memory(number))
            chunk = StateChunk(extent.owner, extent.begin, extent.end, values, moves)
            yield chunk
            writes.append(_start(stream, extent, memory(number), writing=True) if chunk.changed else None)
        while writes:
            _wait(writes.popleft())
    finally:
        for transfer in (*reads, *writes):
            with contextlib.suppress(RuntimeError):  # after another error, which is the one to raise
                _wait(transfer)


def _start(stream: StateStream, extent: _ChunkExtent, memory: torch.Tensor, writing: bool) -> Transfer:
    chunks_before = extent.begin // stream.chunk_elements
    offset_of_state = extent.state.target if writing else extent.state.offset
    offset = offset_of_state + chunks_before * stream.chunk_bytes
    if writing:
        stream.transfers.record("host", "nvme", memory.nbytes)
        return stream.store.write(offset, memory)
    stream.transfers.record("nvme", "host", memory.nbytes)
    return stream.store.read(offset, memory)


def _values(stream: StateStream, extent: _ChunkExtent, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    values, first = {}, 0
    for kind, field in stream.kinds.items():
        if field.elements != 1:
            raise zero_ext_bug(f"'{kind}' has an entry for {field.elements} elements")
        last = first + (extent.end - extent.begin) * field.dtype.itemsize
        values[kind] = buffer[first:last].view(field.dtype)
        first = last
    return values


def _wait(transfer: Transfer | None) -> None:
    if transfer is not None:
        transfer.wait()
