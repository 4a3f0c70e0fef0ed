"""A rank's shard file: its slices as 1-D tensors in one safetensors file, streamed from where they live."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch

from zero_ext.checkpoint.files import Filesystem, IoThread, byte_view, copy_bytes, raw_view
from zero_ext.checkpoint.format.manifest import FileRecord, SliceRecord, shard_file_name
from zero_ext.checkpoint.format.state_source import BUFFER, TensorSlice
from zero_ext.checkpoint.format.tensor_files import TensorEntry, dtype_name, encode_header
from zero_ext.checkpoint.state_slices import CheckpointSlice, DeviceStaging
from zero_ext.ops.flat import pack_
from zero_ext.ops.host_memory import host_buffer
from zero_ext.ops.storage import crc32c

_STAGING_ALIGNMENT = 64
_BLOCKS = 3
_PACKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def saved_slices(slices: Iterable[TensorSlice], buffers: Mapping[str, torch.Tensor]) -> list[CheckpointSlice]:
    """Return the slices and buffers this rank writes, in file order; empty slices of parameters take no part.

    ValueError or TypeError names a slice that cannot be stored.
    """
    found = []
    for state in slices:
        found.append(CheckpointSlice.of(state))
        if not state.kind or state.kind == BUFFER:
            raise ValueError(
                f"kind of {state.name!r}: expected a kind of parameter state, as 'master', got "
                f"{state.kind!r}. Name the kind of the state."
            )
    for name, buffer in buffers.items():
        found.append(CheckpointSlice(BUFFER, name, 0, buffer.detach().cpu().contiguous().reshape(-1)))
    for saved in found:
        try:
            dtype_name(saved.values.dtype)
        except ValueError as error:
            raise ValueError(f"{saved.label}: {error}") from None
    # Readers want each tensor at its own alignment.
    stored = (saved for saved in found if saved.numel or saved.shape is not None)
    return sorted(stored, key=lambda saved: -saved.values.dtype.itemsize)


def stage_slices(slices: Sequence[CheckpointSlice]) -> list[CheckpointSlice]:
    """Return copies of the slices in one host buffer, which they keep alive; ValueError if one is stored."""
    tensors = [_in_memory(saved) for saved in slices]
    offsets, size = [], 0
    for tensor in tensors:
        offsets.append(size)
        size += -(-tensor.nbytes // _STAGING_ALIGNMENT) * _STAGING_ALIGNMENT
    buffer = host_buffer(size)
    staged = [
        buffer[offset : offset + tensor.nbytes].view(tensor.dtype)
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]
    staging = DeviceStaging()
    packed: dict[torch.dtype, list[int]] = defaultdict(list)
    for number, (tensor, copy) in enumerate(zip(tensors, staged, strict=True)):
        if tensor.device.type != "cpu":
            rest = byte_view(copy)
            for chunk in staging.read(tensor):
                copy_bytes(rest[: chunk.numel()], chunk)
                rest = rest[chunk.numel() :]
        elif tensor.dtype in _PACKED_DTYPES:
            packed[tensor.dtype].append(number)
        else:
            copy_bytes(byte_view(copy), byte_view(tensor))
    for dtype, numbers in packed.items():
        # One parallel pass: a copy for each of many small tensors waits for its threads each time.
        starts = [offsets[number] // dtype.itemsize for number in numbers]
        pack_(buffer.view(dtype), [tensors[number] for number in numbers], starts)
    return [saved._replace(values=copy) for saved, copy in zip(slices, staged, strict=True)]


def write_shard(
    filesystem: Filesystem, directory: Path, rank: int, slices: Sequence[CheckpointSlice]
) -> tuple[FileRecord, list[SliceRecord]]:
    """Write the rank's file and return what the manifest says of it; every byte is on the disk then.

    While a chunk is read from a store or a device and hashed, those before it are being written.
    CheckpointError names a slice if its store cannot be read.
    """
    path = directory / shard_file_name(rank)
    # Keys for readers other than this library.
    entries = [
        TensorEntry(f"{each.name}:{each.kind}:{each.start}", each.values.dtype, (each.numel,))
        for each in slices
    ]
    header = encode_header(entries, {"format": "pt", "content": "zero_ext shard; see manifest.json"})
    header_bytes = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    records, offset = [], len(header)
    staging = DeviceStaging()
    with StreamWriter(filesystem, path) as writer:
        writer.append(header_bytes)
        for saved, entry in zip(slices, entries, strict=True):
            checksums = []
            for chunk in saved.chunks(staging):
                writer.append(chunk)
                checksums.append(crc32c(chunk))
            record = SliceRecord(
                file=rank,
                kind=saved.kind,
                name=saved.name,
                start=saved.start,
                numel=saved.numel,
                dtype=dtype_name(entry.dtype),
                offset=offset,
                crc32c=checksums,
                shape=None if saved.shape is None else list(saved.shape),
            )
            records.append(record)
            offset += entry.nbytes
        writer.finish()
    filesystem.sync_directory(directory)
    file = FileRecord(
        name=path.name, bytes=offset, header_bytes=len(header), header_crc32c=crc32c(header_bytes)
    )
    return file, records


def _in_memory(saved: CheckpointSlice) -> torch.Tensor:
    if not isinstance(saved.values, torch.Tensor):
        raise ValueError(
            f"{saved.label}: it is in a store, and only slices in memory can be staged. Write it without "
            "staging."
        )
    return saved.values


class StreamWriter:
    """A new file at ``path``; bytes given to ``append`` reach it in order, ``finish`` puts them on the disk.

    Memory: three blocks of ``filesystem.block_bytes``. A context manager that closes the file; an exception
    of the writing thread is raised by the next ``append`` or by ``finish``.
    """

    def __init__(self, filesystem: Filesystem, path: Path) -> None:
        self._filesystem = filesystem
        self._path = path
        # On huge pages, which direct I/O maps in a fraction of the time that small ones take.
        self._blocks = [host_buffer(filesystem.block_bytes) for _ in range(_BLOCKS)]
        self._writes: list[Future[None] | None] = [None] * _BLOCKS
        self._block = 0
        self._filled = 0
        self._worker = IoThread(f"write {path.name}")
        self._descriptor = -1

    def __enter__(self) -> StreamWriter:
        self._descriptor = self._filesystem.create(self._path)
        self._worker.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._worker.__exit__(*error)
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
