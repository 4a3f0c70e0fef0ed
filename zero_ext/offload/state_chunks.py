"""Optimizer state on NVMe chunk by chunk in Python: read ahead of need and written behind it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Sequence
from typing import NamedTuple

import torch

from zero_ext import ops
from zero_ext.offload.nvme_store import Transfer
from zero_ext.offload.state_stream import NvmeState, StateStream

_BUFFERS = 3  # one is read, one worked on, one written


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


class _Place(NamedTuple):
    owner: int
    state: NvmeState
    begin: int
    end: int


class StateChunks:
    """Three buffers of a chunk each, through which whole ranges pass whose kinds have a value an element."""

    def __init__(self, stream: StateStream) -> None:
        self._stream = stream
        full = stream.extent_bytes(stream.chunk_elements)
        self._buffers = [ops.host_buffer(full) for _ in range(_BUFFERS)]
        stream.staging_bytes += _BUFFERS * full

    def visit(self, states: Sequence[tuple[int, NvmeState]]) -> Generator[StateChunk]:
        """Every chunk of ``states``, which come with their index, in order. While one is worked on the next
        is read and the last, if it was changed, written.

        Raises ``RuntimeError`` if a transfer failed; none is in flight once the iterator has ended or was
        closed.
        """
        places = [_Place(index, state, *span) for index, state in states for span in state.spans()]
        reads: deque[Transfer] = deque()
        writes: deque[Transfer | None] = deque()
        try:
            for number, place in enumerate(places):
                if number == 0:
                    reads.append(self._start(place, number, writing=False))
                if number + 1 < len(places):
                    if len(writes) == _BUFFERS - 1:
                        _wait(writes.popleft())
                    reads.append(self._start(places[number + 1], number + 1, writing=False))
                reads.popleft().wait()
                moves = place.state.target != place.state.offset
                values = self._values(place, number)
                chunk = StateChunk(place.owner, place.begin, place.end, values, moves)
                yield chunk
                writes.append(self._start(place, number, writing=True) if chunk.changed else None)
            while writes:
                _wait(writes.popleft())
        finally:
            for transfer in (*reads, *writes):
                with contextlib.suppress(RuntimeError):  # after another error, which is the one to tell
                    _wait(transfer)

    def _start(self, place: _Place, number: int, writing: bool) -> Transfer:
        stream = self._stream
        chunks_before = place.begin // stream.chunk_elements
        extent = place.state.target if writing else place.state.offset
        offset = extent + chunks_before * stream.extent_bytes(stream.chunk_elements)
        memory = self._buffers[number % _BUFFERS][: stream.extent_bytes(place.end - place.begin)]
        if writing:
            stream.transfers.record("host", "nvme", memory.nbytes)
            return stream.store.write(offset, memory)
        stream.transfers.record("nvme", "host", memory.nbytes)
        return stream.store.read(offset, memory)

    def _values(self, place: _Place, number: int) -> dict[str, torch.Tensor]:
        buffer, values, first = self._buffers[number % _BUFFERS], {}, 0
        for kind, field in self._stream.kinds.items():
            if field.elements != 1:
                raise AssertionError(f"'{kind}' has an entry for {field.elements} elements")
            last = first + (place.end - place.begin) * field.dtype.itemsize
            values[kind] = buffer[first:last].view(field.dtype)
            first = last
        return values


def _wait(transfer: Transfer | None) -> None:
    if transfer is not None:
        transfer.wait()
