"""A rank's shard file: its slices as 1-D tensors in one safetensors file, streamed from where they live."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from zero_ext.checkpoint.files.filesystem import Filesystem
from zero_ext.checkpoint.files.raw_buffers import byte_view, copy_bytes
from zero_ext.checkpoint.format.dtypes import dtype_name
from zero_ext.checkpoint.format.manifest import CHUNK_BYTES, FileRecord, SliceRecord
from zero_ext.checkpoint.format.manifest_check import shard_file_name
from zero_ext.checkpoint.format.safetensors_header import TensorEntry, by_alignment, encode_header
from zero_ext.checkpoint.format.state_source import BUFFER, StoredValues, TensorSlice
from zero_ext.checkpoint.transfer.device_staging import DeviceStaging
from zero_ext.checkpoint.transfer.read_plan import check_slice
from zero_ext.checkpoint.transfer.slice_io import byte_count, element_count, read_stored
from zero_ext.checkpoint.transfer.stream_writer import StreamWriter
from zero_ext.ops import host_buffer, pack_
from zero_ext.ops.storage import crc32c

_STAGING_ALIGNMENT = 64
_PACKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class SavedSlice(NamedTuple):
    """A slice to be written: live memory of host or device, a staged copy of it, or values in a store."""

    kind: str
    name: str
    start: int
    values: torch.Tensor | StoredValues

    @property
    def key(self) -> str:
        """Its name in the safetensors file, for readers other than this library."""
        return f"{self.name}:{self.kind}:{self.start}"

    @property
    def label(self) -> str:
        """Its name in errors."""
        return f"{self.kind} of {self.name!r}"

    @property
    def numel(self) -> int:
        """Elements of it."""
        return element_count(self.values)

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return byte_count(self.values)

    @property
    def is_stored(self) -> bool:
        """Return whether it has to be read from a store."""
        return not isinstance(self.values, torch.Tensor)

    def chunks(self, staging: DeviceStaging) -> Iterator[torch.Tensor]:
        """Its bytes in host memory, as uint8 chunks of CHUNK_BYTES at most, each valid until the next one;
        what is on a device comes through ``staging``, stored values are in memory two chunks at a time."""
        values = self.values
        if isinstance(values, torch.Tensor):
            on_host = values.device.type == "cpu"
            for chunk in (byte_view(values),) if on_host else staging.read(values):
                yield from chunk.split(CHUNK_BYTES)
            return
        elements = CHUNK_BYTES // values.dtype.itemsize
        for begin in range(0, self.numel, elements):
            end = min(begin + elements, self.numel)
            yield byte_view(read_stored(values, begin, end, self.label))


def saved_slices(slices: Iterable[TensorSlice], buffers: Mapping[str, torch.Tensor]) -> list[SavedSlice]:
    """Return the slices and buffers this rank writes, in file order; empty ones take no part.

    ValueError or TypeError names a slice that cannot be stored.
    """
    found = []
    for state in slices:
        check_slice(state)
        if not state.kind or state.kind == BUFFER:
            raise ValueError(
                f"kind of {state.name!r}: expected a kind of parameter state, as 'master', got "
                f"{state.kind!r}. Name the kind of the state."
            )
        values = state.tensor.detach() if isinstance(state.tensor, torch.Tensor) else state.tensor
        found.append(SavedSlice(state.kind, state.name, state.start, values))
    for name, buffer in buffers.items():
        found.append(SavedSlice(BUFFER, name, 0, buffer.detach().cpu().contiguous().reshape(-1)))
    for saved in found:
        _check_dtype(saved)
    found = [saved for saved in found if saved.numel]
    return [found[index] for index in by_alignment(_entries(found))]


def stage_slices(slices: Sequence[SavedSlice]) -> list[SavedSlice]:
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
    on_host = [number for number, tensor in enumerate(tensors) if tensor.device.type == "cpu"]
    for number in sorted(set(range(len(tensors))).difference(on_host)):
        rest = byte_view(staged[number])
        for chunk in staging.read(tensors[number]):
            copy_bytes(rest[: chunk.numel()], chunk)
            rest = rest[chunk.numel() :]
    for dtype in {tensors[number].dtype for number in on_host}:
        of_dtype = [number for number in on_host if tensors[number].dtype == dtype]
        sources = [tensors[number] for number in of_dtype]
        if dtype in _PACKED_DTYPES:
            # One parallel pass: a copy for each of many small tensors waits for its threads each time.
            pack_(buffer.view(dtype), sources, [offsets[number] // dtype.itemsize for number in of_dtype])
        else:
            for number, source in zip(of_dtype, sources, strict=True):
                copy_bytes(byte_view(staged[number]), byte_view(source))
    return [saved._replace(values=copy) for saved, copy in zip(slices, staged, strict=True)]


def write_shard(
    filesystem: Filesystem, directory: Path, rank: int, slices: Sequence[SavedSlice]
) -> tuple[FileRecord, list[SliceRecord]]:
    """Write the rank's file and return what the manifest says of it; every byte is on the disk then.

    While a chunk is read from a store or a device and hashed, those before it are being written.
    CheckpointError names a slice if its store cannot be read.
    """
    path = directory / shard_file_name(rank)
    header = encode_header(_entries(slices), {"format": "pt", "content": "zero_ext shard; see manifest.json"})
    header_bytes = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    records, offset = [], len(header)
    staging = DeviceStaging()
    with StreamWriter(filesystem, path) as writer:
        writer.append(header_bytes)
        for saved in slices:
            checksums = []
            for chunk in saved.chunks(staging):
                writer.append(chunk)
                checksums.append(crc32c(chunk))
            records.append(_record(rank, saved, offset, checksums))
            offset += saved.nbytes
        writer.finish()
    filesystem.sync_directory(directory)
    file = FileRecord(
        name=path.name, bytes=offset, header_bytes=len(header), header_crc32c=crc32c(header_bytes)
    )
    return file, records


def _record(rank: int, saved: SavedSlice, offset: int, checksums: list[int]) -> SliceRecord:
    return SliceRecord(
        file=rank,
        kind=saved.kind,
        name=saved.name,
        start=saved.start,
        numel=saved.numel,
        dtype=dtype_name(saved.values.dtype),
        offset=offset,
        crc32c=checksums,
    )


def _entries(slices: Iterable[SavedSlice]) -> list[TensorEntry]:
    return [TensorEntry(saved.key, saved.values.dtype, (saved.numel,)) for saved in slices]


def _check_dtype(saved: SavedSlice) -> None:
    try:
        dtype_name(saved.values.dtype)
    except ValueError as error:
        raise ValueError(f"{saved.label}: {error}") from None


def _in_memory(saved: SavedSlice) -> torch.Tensor:
    if not isinstance(saved.values, torch.Tensor):
        raise ValueError(
            f"{saved.label}: it is in a store, and only slices in memory can be staged. Write it without "
            "staging."
        )
    return saved.values
