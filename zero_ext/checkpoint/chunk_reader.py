"""Reads chunks of files in large reads, and hashes some while others arrive."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from zero_ext.checkpoint.files import CheckpointError, IoThread, open_regular, raw_view
from zero_ext.checkpoint.format.manifest import Manifest, SliceRecord, slice_bytes
from zero_ext.ops.host_memory import host_buffer
from zero_ext.ops.storage import crc32c

_BATCH_BYTES = 2 << 20  # small enough to be hashed while still in the processor's cache
_BATCH_CHUNKS = 512  # each is one entry of a scattered read; systems allow 1024
_ALIGNMENT = 64
# Some hash while others wait for the disk, which answers several requests at once. That is faster than
# POSIX_FADV_WILLNEED, for which Linux fills the page cache in its smallest units.
_WORKERS = 4
_BATCHES_AHEAD = 2 * _WORKERS


class Chunk(NamedTuple):
    """Bytes of a file that are read as one. Those of shard files are hashed, the unit of verification; others
    have no ``crc32c``. ``label`` names them in errors."""

    file: int
    offset: int
    size: int
    crc32c: int | None
    label: str


class ChunkRequest(NamedTuple):
    """A chunk to read, into ``target`` (uint8 [size]) or, for None, into scratch memory."""

    chunk: Chunk
    target: torch.Tensor | None


class ReadChunk(NamedTuple):
    """A chunk that was read: its request's index, its bytes (valid until the next one), any checksum."""

    request: int
    data: torch.Tensor
    crc32c: int | None


def slice_chunks(record: SliceRecord, chunk_bytes: int, first: int, end: int) -> Iterator[Chunk]:
    """Chunks ``first`` to ``end`` (exclusive) of a slice."""
    label = f"{record.kind} of {record.name!r}"
    size = slice_bytes(record)
    for index in range(first, end):
        begin = index * chunk_bytes
        length = min(chunk_bytes, size - begin)
        yield Chunk(record.file, record.offset + begin, length, record.crc32c[index], label)


def header_chunk(manifest: Manifest, file: int) -> Chunk:
    """Return the table at the beginning of a shard file."""
    entry = manifest.files[file]
    return Chunk(file, 0, entry.header_bytes, entry.header_crc32c, "table of tensors")


def shard_paths(directory: Path, manifest: Manifest) -> list[Path]:
    """Return the shard files of a checkpoint, in the order in which chunks number them."""
    return [directory / entry.name for entry in manifest.files]


class ChunkReader:
    """The files ``paths``, opened on first use; a context manager that closes them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._descriptors: dict[int, int] = {}
        self._opening = threading.Lock()

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read(self, reads: Sequence[ChunkRequest]) -> Iterator[ReadChunk]:
        """Read everything in the order given and yield each chunk with the checksum of what was read.

        Neighbors that follow each other in a file become one read: file order is fastest. CheckpointError
        naming file and offset when a file cannot be opened or read, or ends too early.
        """
        batches = list(_batches(reads))
        sizes = [
            sum(_aligned(reads[index].chunk.size) for index in batch if reads[index].target is None)
            for batch in batches
        ]
        scratch = [host_buffer(max(*sizes, 1)) for _ in batches[: _BATCHES_AHEAD + 1]]
        with ExitStack() as running:
            workers = [running.enter_context(IoThread("read chunks")) for _ in range(_WORKERS)]
            pending: deque[Future[list[ReadChunk]]] = deque()
            for number, batch in enumerate(batches):
                fetch = partial(self._fetch, reads, batch, scratch[number % len(scratch)])
                pending.append(workers[number % _WORKERS].submit(fetch))
                if len(pending) > _BATCHES_AHEAD:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()

    def verified(self, reads: Sequence[ChunkRequest]) -> Iterator[tuple[int, torch.Tensor]]:
        """Read as :meth:`read`, and yield the number of each request with its bytes. CheckpointError, naming
        file, bytes and tensor, for a chunk with another checksum than its own."""
        for number, data, found in self.read(reads):
            chunk = reads[number].chunk
            if found != chunk.crc32c:
                raise CheckpointError(self.damage(chunk, found))
            yield number, data

    def damage(self, chunk: Chunk, found: int | None) -> str:
        """Return what to say about a chunk with the checksum ``found``, not its own."""
        return (
            f"{self._paths[chunk.file]}: damaged: bytes {chunk.offset} to {chunk.offset + chunk.size} "
            f"({chunk.label}): expected CRC32C {chunk.crc32c or 0:08x}, as the manifest says, got "
            f"{found or 0:08x}. Use another checkpoint."
        )

    def _fetch(
        self, reads: Sequence[ChunkRequest], batch: Sequence[int], scratch: torch.Tensor
    ) -> list[ReadChunk]:
        targets = _targets([reads[index] for index in batch], scratch)
        first = reads[batch[0]].chunk
        views = [raw_view(target) for target in targets]
        offset = first.offset
        while views:
            count = self._read_some(first.file, views, offset)
            offset += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]
        return [
            ReadChunk(index, data, None if reads[index].chunk.crc32c is None else crc32c(data))
            for index, data in zip(batch, targets, strict=True)
        ]

    def _read_some(self, file: int, views: list[memoryview], offset: int) -> int:
        try:
            count = os.preadv(self._descriptor(file), views, offset)
        except OSError as error:
            raise CheckpointError(
                f"{self._paths[file]}: reading at byte {offset} failed: {error.strerror}. Check the disk, or "
                "use a copy of the file."
            ) from error
        if count == 0:
            raise CheckpointError(
                f"{self._paths[file]}: it ends at byte {offset}. Use another copy, since this one was "
                "truncated."
            )
        return count

    def _descriptor(self, file: int) -> int:
        with self._opening:
            if file not in self._descriptors:
                self._descriptors[file] = descriptor = open_regular(self._paths[file])
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            return self._descriptors[file]


def _batches(reads: Sequence[ChunkRequest]) -> Iterator[list[int]]:
    """Chunks that follow each other in one file without a hole, each one read."""
    batch: list[int] = []
    size = 0
    for index, (chunk, _) in enumerate(reads):
        if batch:
            last = reads[batch[-1]].chunk
            joined = (last.file, last.offset + last.size) == (chunk.file, chunk.offset)
            if not joined or size + chunk.size > _BATCH_BYTES or len(batch) == _BATCH_CHUNKS:
                yield batch
                batch, size = [], 0
        batch.append(index)
        size += chunk.size
    if batch:
        yield batch


def _targets(reads: Sequence[ChunkRequest], scratch: torch.Tensor) -> list[torch.Tensor]:
    targets, used = [], 0
    for read in reads:
        if read.target is None:
            targets.append(scratch[used : used + read.chunk.size])
            used += _aligned(read.chunk.size)
        else:
            targets.append(read.target)
    return targets


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
