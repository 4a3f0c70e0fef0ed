"""A shard in storage, piece by piece through memory of the pool: read ahead, written behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from zero_ext.config.buffer_sizes import PIECE_ELEMENTS
from zero_ext.config.overlap_limits import READS_AHEAD, WRITES_BEHIND
from zero_ext.offload import STORAGE_ALIGNMENT, Arrival, StoredHome
from zero_ext.zero.memory.pool import BufferPool

GRAIN = STORAGE_ALIGNMENT // 2  # elements of whole blocks in every dtype that gradients have


class Piece(NamedTuple):
    """The elements of a shard from ``first`` on, in a buffer of the pool that goes with them."""

    first: int
    buffer: torch.Tensor
    values: torch.Tensor


def piece_bounds(home: StoredHome, begin: int, end: int) -> list[tuple[int, int]]:
    """First element and number of elements of pieces of whole blocks that hold [begin, end), the last first.

    Backwards, because a shard that turns wider grows over the pieces behind: those that were read by then.
    """
    starts = range(begin // GRAIN * GRAIN, end, PIECE_ELEMENTS)
    last = min(-(-end // GRAIN) * GRAIN, home.numel)
    return [(first, min(PIECE_ELEMENTS, last - first)) for first in reversed(starts)]


def lend_piece(pool: BufferPool, home: StoredHome, first: int, count: int) -> Piece:
    """A piece of ``home`` whose contents are undefined; all pieces of a home take buffers of one size."""
    buffer = pool.take(home.padded_bytes(min(PIECE_ELEMENTS, home.numel)), purpose="pieces")
    return Piece(first, buffer, buffer.view(home.dtype)[:count])


class PieceReader:
    """Iterates over the pieces of ``home`` that hold [begin, end), the last one first, once.

    Reading begins here and stays ahead. Whoever takes a piece gives its buffer back to the pool;
    :meth:`close` ends what nobody took. Raises ``RuntimeError`` where a transfer failed.
    """

    def __init__(self, home: StoredHome, begin: int, end: int, pool: BufferPool) -> None:
        self._home = home
        self._pool = pool
        self._bounds = deque(piece_bounds(home, begin, end))
        self._ahead: deque[tuple[Piece, Arrival]] = deque()
        self._read_ahead()

    def _read_ahead(self) -> None:
        while self._bounds and len(self._ahead) < READS_AHEAD:
            piece = lend_piece(self._pool, self._home, *self._bounds.popleft())
            whole = piece.buffer[: self._home.padded_bytes(piece.values.numel())].view(self._home.dtype)
            try:
                self._ahead.append((piece, self._home.fetch(whole, piece.first)))
            except RuntimeError:
                self._pool.give(piece.buffer)
                self.close()
                raise

    def __iter__(self) -> Iterator[Piece]:
        while self._ahead:
            piece, arrival = self._ahead[0]
            arrival.wait()
            self._ahead.popleft()
            self._read_ahead()
            yield piece

    def close(self) -> None:
        """Waits for what is under way and gives its memory back."""
        self._bounds.clear()
        while self._ahead:
            piece, arrival = self._ahead.popleft()
            try:
                arrival.wait()
            except RuntimeError:
                continue  # said already, or of no interest to anybody
            finally:
                self._pool.give(piece.buffer)


class PieceWriter:
    """Writes pieces, a few at a time in flight; the pool has their buffers back once they are written."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._behind: deque[tuple[Arrival, torch.Tensor]] = deque()
        self._failure: RuntimeError | None = None

    def start(self, home: StoredHome, piece: Piece) -> None:
        """Takes over ``piece`` and starts to write it to its place in ``home``."""
        while len(self._behind) >= WRITES_BEHIND:
            self._end_oldest()
        whole = piece.buffer[: home.padded_bytes(piece.values.numel())].view(home.dtype)
        try:
            self._behind.append((home.write(whole, piece.first), piece.buffer))
        except RuntimeError:
            self._pool.give(piece.buffer)
            raise

    def wait(self) -> None:
        """Returns when all is written; ``RuntimeError`` for the first write that failed since the last
        call."""
        while self._behind:
            self._end_oldest()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _end_oldest(self) -> None:
        arrival, buffer = self._behind.popleft()
        try:
            arrival.wait()
        except RuntimeError as error:
            self._failure = self._failure or error
        self._pool.give(buffer)
