"""Writes a file as a stream of large blocks while the next one is being filled and hashed."""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

import torch

from zero_ext.checkpoint.files.filesystem import Filesystem
from zero_ext.checkpoint.files.io_thread import IoThread
from zero_ext.checkpoint.files.raw_buffers import aligned_block, copy_bytes, raw_view

_BLOCKS = 3


class StreamWriter:
    """A new file at ``path``; bytes given to ``append`` reach it in order, ``finish`` puts them on the disk.

    Memory: three blocks of ``filesystem.block_bytes``. A context manager that closes the file; an exception
    of the writing thread is raised by the next ``append`` or by ``finish``.
    """

    def __init__(self, filesystem: Filesystem, path: Path) -> None:
        self._filesystem = filesystem
        self._path = path
        self._blocks = [aligned_block(filesystem.block_bytes) for _ in range(_BLOCKS)]
        self._writes: list[Future[None] | None] = [None] * _BLOCKS
        self._block = 0
        self._filled = 0
        self._worker = IoThread(f"write {path.name}")
        self._descriptor = -1

    def __enter__(self) -> StreamWriter:
        self._descriptor = self._filesystem.create(self._path)
        self._worker.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.__exit__(kind, error, trace)
        os.close(self._descriptor)

    def append(self, data: torch.Tensor) -> None:
        """Add ``data`` (uint8 [n], CPU); its memory is free again when this returns."""
        start = 0
        while start < data.numel():
            block = self._blocks[self._block]
            count = min(data.numel() - start, block.numel() - self._filled)
            copy_bytes(block[self._filled : self._filled + count], data[start : start + count])
            self._filled += count
            start += count
            if self._filled == block.numel():
                self._write_block()

    def finish(self) -> None:
        """Return when every byte is on the disk."""
        if self._filled:
            self._write_block()
        for write in self._writes:
            if write is not None:
                write.result()
        self._filesystem.sync(self._descriptor, self._path)

    def _write_block(self) -> None:
        data = raw_view(self._blocks[self._block][: self._filled])
        self._writes[self._block] = self._worker.submit(
            lambda: self._filesystem.write(self._descriptor, data, self._path)
        )
        self._block = (self._block + 1) % _BLOCKS
        self._filled = 0
        oldest = self._writes[self._block]
        if oldest is not None:
            oldest.result()
