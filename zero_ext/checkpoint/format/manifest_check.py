"""Judges a well-typed manifest: do its sizes, slices and files agree with each other and with the disk?

Nothing of a checkpoint is used before this has passed.
"""

from __future__ import annotations

import math
import stat
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from zero_ext.checkpoint.files.checkpoint_error import CheckpointError
from zero_ext.checkpoint.format.dtypes import dtype_named
from zero_ext.checkpoint.format.manifest import MANIFEST_NAME, Manifest, SliceRecord
from zero_ext.checkpoint.format.memory_order import memory_order
from zero_ext.checkpoint.format.state_source import BUFFER, MASTER


def shard_file_name(rank: int) -> str:
    """The name of a rank's shard file."""
    return f"rank-{rank:05d}.safetensors"


def check_manifest(manifest: Manifest, directory: Path) -> None:
    """CheckpointError naming the manifest, the entry and the values unless every rule holds.

    Files: one for each rank, with the expected name, regular, of the stated size. Tables: dense strides,
    known dtypes, no name used twice. Slices: inside their file and their tensor, no two over the same bytes,
    together covering each (kind, name) exactly once, with every parameter's value among them.
    """
    path = directory / MANIFEST_NAME
    try:
        _check_files(manifest, directory)
        _check_tables(manifest)
        for index, record in enumerate(manifest.slices):
            _check_slice(manifest, index, record)
        check_disjoint_bytes(manifest)
        check_cover(manifest)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; the checkpoint is damaged or foreign") from None


def tensor_elements(manifest: Manifest, kind: str, name: str) -> int:
    """Elements of the full tensor that a slice is cut from; ValueError for a name no table lists."""
    table = manifest.buffers if kind == BUFFER else manifest.parameters
    if name not in table:
        raise ValueError(f"{kind} of {name!r} is stored, but no such {_noun(kind)} is listed")
    return math.prod(table[name].shape)


def check_cover(manifest: Manifest) -> None:
    """ValueError unless the slices of each (kind, name) join without gap or overlap, none missing."""
    by_tensor: dict[tuple[str, str], list[SliceRecord]] = defaultdict(list)
    for record in manifest.slices:
        by_tensor[record.kind, record.name].append(record)
    wanted = {(MASTER, name) for name, entry in manifest.parameters.items() if math.prod(entry.shape)}
    wanted |= {(BUFFER, name) for name, entry in manifest.buffers.items() if math.prod(entry.shape)}
    for kind, name in sorted(wanted - by_tensor.keys()):
        raise ValueError(f"{kind} of {name!r} is not stored")
    for (kind, name), records in by_tensor.items():
        _check_coverage(kind, name, records, tensor_elements(manifest, kind, name))


def check_disjoint_bytes(manifest: Manifest) -> None:
    """ValueError if two slices share bytes of a file, or if a file holds bytes that belong to no slice."""
    ends = [entry.header_bytes for entry in manifest.files]
    for record in sorted(manifest.slices, key=lambda record: (record.file, record.offset)):
        name = manifest.files[record.file].name
        if record.offset != ends[record.file]:
            raise ValueError(
                f"{name}: {record.kind} of {record.name!r} begins at byte {record.offset}, "
                f"the bytes before it end at {ends[record.file]}"
            )
        ends[record.file] += slice_bytes(record)
    for entry, end in zip(manifest.files, ends, strict=True):
        if end != entry.bytes:
            raise ValueError(f"{entry.name}: its slices end at byte {end}, the file at {entry.bytes}")


def slice_bytes(record: SliceRecord) -> int:
    """Stored size of a slice in bytes."""
    return record.numel * dtype_named(record.dtype).itemsize


def _check_files(manifest: Manifest, directory: Path) -> None:
    if len(manifest.files) != manifest.world_size:
        raise ValueError(f"{len(manifest.files)} files are listed for a world size of {manifest.world_size}")
    for rank, entry in enumerate(manifest.files):
        if entry.name != shard_file_name(rank):
            raise ValueError(f"file {rank} is named {entry.name!r}, wanted {shard_file_name(rank)!r}")
        try:
            found = (directory / entry.name).stat()
        except OSError as error:
            raise ValueError(f"{entry.name} cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{entry.name} is not a regular file")
        if found.st_size != entry.bytes:
            raise ValueError(
                f"{entry.name} has {found.st_size} bytes, wanted {entry.bytes}: it was truncated or replaced"
            )


def _check_tables(manifest: Manifest) -> None:
    names: set[str] = set()
    for name, parameter in manifest.parameters.items():
        for known in (name, *parameter.aliases):
            if known in names:
                raise ValueError(f"parameter name {known!r} is listed twice")
            names.add(known)
        dtype_named(parameter.dtype)
        _check_size(name, parameter.shape)
        try:
            memory_order(parameter.shape, parameter.stride)
        except ValueError as error:
            raise ValueError(f"parameter {name!r}: {error}") from None
    for name, buffer in manifest.buffers.items():
        dtype_named(buffer.dtype)
        _check_size(name, buffer.shape)


def _check_size(name: str, shape: Iterable[int]) -> None:
    if math.prod(shape) >= 1 << 60:
        raise ValueError(f"{name!r} has shape {list(shape)}: more elements than any memory holds")


def _check_slice(manifest: Manifest, index: int, record: SliceRecord) -> None:
    where = f"slice {index} ({record.kind} of {record.name!r} from element {record.start})"
    elements = tensor_elements(manifest, record.kind, record.name)
    if record.numel == 0 or record.start + record.numel > elements:
        raise ValueError(f"{where} has {record.numel} elements, its tensor {elements} in all")
    if record.file >= len(manifest.files):
        raise ValueError(f"{where} is in file {record.file} of {len(manifest.files)}")
    if record.kind == BUFFER and record.dtype != manifest.buffers[record.name].dtype:
        raise ValueError(f"{where} is {record.dtype}, its buffer {manifest.buffers[record.name].dtype}")
    size = slice_bytes(record)
    if record.offset + size > manifest.files[record.file].bytes:
        raise ValueError(f"{where} ends at byte {record.offset + size}, past the end of its file")
    chunks = -(-size // manifest.chunk_bytes)
    if len(record.crc32c) != chunks:
        raise ValueError(f"{where} has {len(record.crc32c)} checksums for {chunks} chunks")


def _check_coverage(kind: str, name: str, records: list[SliceRecord], elements: int) -> None:
    end = 0
    for record in sorted(records, key=lambda record: record.start):
        if record.start != end:
            problem = "twice" if record.start < end else "not"
            first, last = sorted((record.start, end))
            raise ValueError(f"{kind} of {name!r}: elements {first} to {last} are stored {problem}")
        if record.dtype != records[0].dtype:
            raise ValueError(f"{kind} of {name!r} is stored as {records[0].dtype} and as {record.dtype}")
        end = record.start + record.numel
    if end != elements:
        raise ValueError(f"{kind} of {name!r}: elements {end} to {elements} are not stored")


def _noun(kind: str) -> str:
    return "buffer" if kind == BUFFER else "parameter"
