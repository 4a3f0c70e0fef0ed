"""Reduced gradient shards on NVMe: read and written in chunks that go through memory of the pool."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from zero_ext import ops
from zero_ext.config import Tier
from zero_ext.config.buffer_sizes import GRADIENT_CHUNK_ELEMENTS, READS_AHEAD, WRITES_BEHIND
from zero_ext.offload import STORAGE_ALIGNMENT, CopyHandle, NvmeShard, ShardStorage, TierManager
from zero_ext.zero.gradients.gradient_storage import GradientStorage, Squares
from zero_ext.zero.memory.pool import BufferPool

GRAIN = STORAGE_ALIGNMENT // 2  # elements in full storage blocks, for all dtypes of gradients


class ShardChunk(NamedTuple):
    """The elements of a shard from ``first`` on, with the pool buffer that holds them."""

    first: int
    buffer: torch.Tensor
    values: torch.Tensor

    def blocks(self, storage: NvmeShard) -> torch.Tensor:
        """Return the full blocks of the buffer that the values take in ``storage``."""
        return self.buffer[: storage.padded_bytes(self.values.numel())].view(storage.dtype)

    def within(self, begin: int, end: int) -> torch.Tensor:
        """Return the elements that are in [begin, end)."""
        return self.values[max(begin - self.first, 0) : end - self.first]


def chunk_bounds(storage: NvmeShard, begin: int, end: int) -> list[tuple[int, int]]:
    """Return first element and length of the block-aligned chunks that cover [begin, end), in order."""
    last = min(-(-end // GRAIN) * GRAIN, storage.numel)
    starts = range(begin // GRAIN * GRAIN, end, GRADIENT_CHUNK_ELEMENTS)
    return [(first, min(GRADIENT_CHUNK_ELEMENTS, last - first)) for first in starts]


def acquire_chunk(pool: BufferPool, storage: NvmeShard, first: int, count: int) -> ShardChunk:
    """Acquire an uninitialized chunk of ``storage``. All chunks of a storage use buffers of one size."""
    buffer = pool.acquire(storage.padded_bytes(min(GRADIENT_CHUNK_ELEMENTS, storage.numel)), purpose="chunks")
    return ShardChunk(first, buffer, buffer.view(storage.dtype)[:count])


class GradientChunkReader:
    """Iterates once over chunks of ``storage``, as :func:`chunk_bounds` returns them. Reads start in the
    constructor and stay ahead. The consumer releases the buffer of each chunk. :meth:`close` releases the
    chunks that were not consumed. A failed transfer raises ``RuntimeError``."""

    def __init__(self, storage: NvmeShard, bounds: Iterable[tuple[int, int]], pool: BufferPool) -> None:
        self._storage, self._pool = storage, pool
        self._bounds = deque(bounds)
        self._ahead: deque[tuple[ShardChunk, CopyHandle]] = deque()
        self._read_ahead()

    def _read_ahead(self) -> None:
        while self._bounds and len(self._ahead) < READS_AHEAD:
            chunk = acquire_chunk(self._pool, self._storage, *self._bounds.popleft())
            try:
                copy = self._storage.fetch(chunk.blocks(self._storage), chunk.first)
            except RuntimeError:
                self._pool.release(chunk.buffer)
                self.close()
                raise
            self._ahead.append((chunk, copy))

    def __iter__(self) -> Iterator[ShardChunk]:
        while self._ahead:
            chunk, copy = self._ahead[0]
            # The chunk stays in the queue until it is read, so that ``close`` releases it after an error.
            copy.wait()
            self._ahead.popleft()
            self._read_ahead()
            yield chunk

    def close(self) -> None:
        """Wait for reads in flight and release their buffers."""
        self._bounds.clear()
        while self._ahead:
            chunk, copy = self._ahead.popleft()
            try:
                copy.wait()
            except RuntimeError:
                continue  # raised already, or the consumer stopped reading
            finally:
                self._pool.release(chunk.buffer)


class ChunkWriter:
    """Writes chunks with a few in flight. A buffer is released to the pool once it is written."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._behind: deque[tuple[CopyHandle, torch.Tensor]] = deque()
        self._failure: RuntimeError | None = None

    def start(self, storage: NvmeShard, chunk: ShardChunk) -> None:
        """Take ownership of ``chunk`` and start to write it to ``storage``."""
        while len(self._behind) >= WRITES_BEHIND:
            self._end_oldest()
        try:
            self._behind.append((storage.write(chunk.blocks(storage), chunk.first), chunk.buffer))
        except RuntimeError:
            self._pool.release(chunk.buffer)
            raise

    def wait(self) -> None:
        """Wait for all writes. Raise ``RuntimeError`` for the first that failed since the last call."""
        while self._behind:
            self._end_oldest()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _end_oldest(self) -> None:
        copy, buffer = self._behind.popleft()
        try:
            copy.wait()
        except RuntimeError as error:
            self._failure = self._failure or error
        # Also after an error, which ``wait`` raises later. Otherwise the pool would lose the buffer.
        self._pool.release(buffer)


class NvmeGradientStorage(GradientStorage):
    """One gradient [numel] in one extent of the NVMe store.

    The first gradient of a step is written from the memory of its reduction. Further ones are added to it
    chunk by chunk. Writes continue after :meth:`adopt` until :meth:`wait_transfers`. A failed transfer is
    stored as ``failure`` and raised by reads only, because it happens on one rank inside backward.
    """

    tier: Tier = "nvme"
    alignment: int = STORAGE_ALIGNMENT

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        accumulation_dtype: torch.dtype,
        pool: BufferPool,
        tiers: TierManager,
    ) -> None:
        self._numel, self._accumulation_dtype, self._pool = numel, accumulation_dtype, pool
        # The extent fits the wider dtype from the start: a later micro-batch may be the first to need it.
        widest = max(dtype, accumulation_dtype, key=lambda each: each.itemsize)
        self._extent = tiers.allocate_nvme_shard(numel, widest)
        self._storage = self._extent.with_dtype(dtype)
        self.dtype = dtype
        self._squares: Squares | None = None  # of the full gradient, None while unknown
        self._reader: GradientChunkReader | None = None
        self._writer = ChunkWriter(pool)

    # -- writing ------------------------------------------------------------------------------------------

    def begin_reduction(self, sums: bool = False) -> torch.Tensor | None:
        """Return None and start to read the gradient to add to."""
        # Reads must not overtake the writes of the reduction before.
        self.wait_transfers()
        with self._noting_failure():
            if self.valid:
                # Backwards: a shard that is widened grows over the chunks behind, which were read by then.
                bounds = reversed(chunk_bounds(self._storage, 0, self._numel))
                self._reader = GradientChunkReader(self._storage, bounds, self._pool)
                self.dtype = self._accumulation_dtype
        return None

    def adopt(self, buffer: torch.Tensor, dtype: torch.dtype) -> None:
        """Write the buffer itself if nothing is added to and its dtype is stored. Writes go on afterwards."""
        values = buffer.view(dtype)[: self._numel]
        self._squares = Squares()
        reader, self._reader = self._reader, None
        if reader is not None or (not self.valid and dtype == self._accumulation_dtype):
            self.dtype = self._accumulation_dtype
            # The reader still reads the narrow elements.
            self._storage = self._extent.with_dtype(self.dtype)
        self.valid = True
        is_stored = reader is None and dtype == self.dtype
        with self._noting_failure():
            if is_stored:
                self._write(ShardChunk(0, buffer, values))
            elif reader is not None:
                with contextlib.closing(reader):
                    for chunk in reader:
                        self._write(self._sum_of(chunk, values))
            else:
                for first, count in chunk_bounds(self._storage, 0, self._numel):
                    chunk = acquire_chunk(self._pool, self._storage, first, count)
                    ops.pack_(chunk.values, [values[first : first + count]], [0])
                    self._write(chunk)
        if not is_stored:
            # Otherwise the writer owns the buffer and releases it when it is written.
            self._pool.release(buffer)

    def _sum_of(self, stored: ShardChunk, values: torch.Tensor) -> ShardChunk:
        """Return ``stored``, in the accumulation dtype, plus its elements of ``values``."""
        first, count = stored.first, stored.values.numel()
        total = stored
        if stored.values.dtype != self.dtype:
            total = acquire_chunk(self._pool, self._storage, first, count)
            ops.pack_(total.values, [stored.values], [0])
            self._pool.release(stored.buffer)
        ops.accumulate_(total.values, [values[first : first + count]], [0])
        return total

    def _write(self, chunk: ShardChunk) -> None:
        """Write a chunk to the store, and add its squares while it is in memory."""
        if self._squares is not None:
            self._squares.add(chunk.values)
        self._writer.start(self._storage, chunk)

    def wait_transfers(self) -> None:
        with self._noting_failure():
            self._writer.wait()

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.failure = self.failure or error

    # -- reading ------------------------------------------------------------------------------------------

    def shard(self) -> ShardStorage:
        return self._storage

    def visit(self, begin: int, end: int) -> Iterator[torch.Tensor]:
        """Yield chunks. Raise ``RuntimeError`` if a transfer failed."""
        with contextlib.closing(self._read(begin, end)) as reader:
            for chunk in reader:
                try:
                    yield chunk.within(begin, end)
                finally:
                    self._pool.release(chunk.buffer)

    def change(self, begin: int, end: int, change: Callable[[torch.Tensor], object]) -> None:
        """Change chunks and write them back. An error is stored as ``failure``."""
        self._squares = None
        with self._noting_failure():
            with contextlib.closing(self._read(begin, end)) as reader:
                for chunk in reader:
                    change(chunk.within(begin, end))
                    self._writer.start(self._storage, chunk)
            self._writer.wait()

    def add_squares(self, squares: Squares) -> None:
        """Add the squares of all elements. Read them only if their squares are unknown."""
        if self._squares is None:
            own = Squares()
            for values in self.visit(0, self._numel):
                own.add(values)
            self._squares = own
        squares.add_all(self._squares)

    def forget(self) -> None:
        """Discard the gradient and the failure. The extent and the dtype stay."""
        self.wait_transfers()
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        # ``begin_reduction`` may have widened the dtype for a reduction that never ended.
        self.dtype = self._storage.dtype
        self.valid = False
        self.failure = None

    def allocated_bytes(self) -> int:
        """Return the space in the store, which is that of the wider dtype."""
        return self._extent.padded_bytes(self._numel)

    def _read(self, begin: int, end: int) -> GradientChunkReader:
        """Read elements after all writes. Raise the first error since the gradient was last forgotten."""
        self.wait_transfers()
        if self.failure is not None:
            raise self.failure
        return GradientChunkReader(self._storage, chunk_bounds(self._storage, begin, end), self._pool)
