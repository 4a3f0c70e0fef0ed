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

_USE_ANOTHER = "Use another checkpoint."
_SAVE_ONCE = "Save every element of it on exactly one rank, in one dtype."
_WRITE_AGAIN = "Write the file again, or use another checkpoint."


def shard_file_name(rank: int) -> str:
    """Return the name of a rank's shard file."""
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
        check_cover(manifest, _USE_ANOTHER)
    except ValueError as error:
        raise CheckpointError(f"{path}: the checkpoint is damaged or foreign. {error}") from None


def tensor_elements(manifest: Manifest, kind: str, name: str, fix: str = _USE_ANOTHER) -> int:
    """Return elements of the full tensor that a slice is cut from; ValueError, ending in ``fix``, for a name
    that no table lists.
    """
    table = manifest.buffers if kind == BUFFER else manifest.parameters
    if name not in table:
        raise ValueError(f"{kind} of {name!r}: it is stored, but no such {_noun(kind)} is listed. {fix}")
    return math.prod(table[name].shape)


def check_cover(manifest: Manifest, fix: str = _SAVE_ONCE) -> None:
    """ValueError, ending in ``fix``, unless the slices of each (kind, name) join without gap or overlap, none
    missing."""
    by_tensor: dict[tuple[str, str], list[SliceRecord]] = defaultdict(list)
    for record in manifest.slices:
        by_tensor[record.kind, record.name].append(record)
    wanted = {(MASTER, name) for name, entry in manifest.parameters.items() if math.prod(entry.shape)}
    wanted |= {(BUFFER, name) for name, entry in manifest.buffers.items() if math.prod(entry.shape)}
    for kind, name in sorted(wanted - by_tensor.keys()):
        raise ValueError(f"{kind} of {name!r}: it is not stored. {fix}")
    for (kind, name), records in by_tensor.items():
        _check_coverage(kind, name, records, tensor_elements(manifest, kind, name, fix), fix)


def check_disjoint_bytes(manifest: Manifest, fix: str = _WRITE_AGAIN) -> None:
    """ValueError, ending in ``fix``, if slices share bytes of a file, or some belong to no slice."""
    ends = [entry.header_bytes for entry in manifest.files]
    for record in sorted(manifest.slices, key=lambda record: (record.file, record.offset)):
        name = manifest.files[record.file].name
        if record.offset != ends[record.file]:
            raise ValueError(
                f"{name}: {record.kind} of {record.name!r}: expected its first byte at {ends[record.file]}, "
                f"where the bytes before it end, got {record.offset}. {fix}"
            )
        ends[record.file] += slice_bytes(record)
    for entry, end in zip(manifest.files, ends, strict=True):
        if end != entry.bytes:
            raise ValueError(
                f"{entry.name}: expected the end of its slices at byte {entry.bytes}, the end of the file, "
                f"got {end}. {fix}"
            )


def slice_bytes(record: SliceRecord) -> int:
    """Return the stored size of a slice in bytes."""
    return record.numel * dtype_named(record.dtype).itemsize


def _check_files(manifest: Manifest, directory: Path) -> None:
    if len(manifest.files) != manifest.world_size:
        raise ValueError(
            f"files: expected {manifest.world_size}, one for each rank of the world size, got "
            f"{len(manifest.files)}. {_USE_ANOTHER}"
        )
    for rank, entry in enumerate(manifest.files):
        if entry.name != shard_file_name(rank):
            raise ValueError(
                f"file {rank}: expected the name {shard_file_name(rank)!r}, got {entry.name!r}. "
                f"{_USE_ANOTHER}"
            )
        try:
            found = (directory / entry.name).stat()
        except OSError as error:
            raise ValueError(
                f"{entry.name}: it cannot be read: {error.strerror}. Put the file back, or use another "
                "checkpoint."
            ) from None
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{entry.name}: it is not a regular file. {_USE_ANOTHER}")
        if found.st_size != entry.bytes:
            raise ValueError(
                f"{entry.name}: expected {entry.bytes} bytes, got {found.st_size}. Use another checkpoint, "
                "since the file was truncated or replaced."
            )


def _check_tables(manifest: Manifest) -> None:
    names: set[str] = set()
    for name, parameter in manifest.parameters.items():
        for known in (name, *parameter.aliases):
            if known in names:
                raise ValueError(f"parameter name {known!r}: it is listed twice. {_USE_ANOTHER}")
            names.add(known)
        dtype_named(parameter.dtype)
        _check_size(name, parameter.shape)
        try:
            memory_order(parameter.shape, parameter.stride)
        except ValueError as error:
            raise ValueError(f"parameters[{name!r}]: {error}") from None
    for name, buffer in manifest.buffers.items():
        dtype_named(buffer.dtype)
        _check_size(name, buffer.shape)


def _check_size(name: str, shape: Iterable[int]) -> None:
    if math.prod(shape) >= 1 << 60:
        raise ValueError(
            f"{name!r}: expected fewer elements than the largest memory holds, got shape {list(shape)}. "
            f"{_USE_ANOTHER}"
        )


def _check_slice(manifest: Manifest, index: int, record: SliceRecord) -> None:
    where = f"slice {index} ({record.kind} of {record.name!r} from element {record.start})"
    elements = tensor_elements(manifest, record.kind, record.name)
    if record.numel == 0 or record.start + record.numel > elements:
        raise ValueError(
            f"{where}: expected 1 to {elements - record.start} elements, which end with its tensor of "
            f"{elements}, got {record.numel}. {_USE_ANOTHER}"
        )
    if record.file >= len(manifest.files):
        raise ValueError(
            f"{where}: expected a file below {len(manifest.files)}, the number of files, got {record.file}. "
            f"{_USE_ANOTHER}"
        )
    if record.kind == BUFFER and record.dtype != manifest.buffers[record.name].dtype:
        raise ValueError(
            f"{where}: expected {manifest.buffers[record.name].dtype}, the dtype of its buffer, got "
            f"{record.dtype}. {_USE_ANOTHER}"
        )
    size = slice_bytes(record)
    if record.offset + size > manifest.files[record.file].bytes:
        raise ValueError(
            f"{where}: expected an end within its file of {manifest.files[record.file].bytes} bytes, got "
            f"byte {record.offset + size}. {_USE_ANOTHER}"
        )
    chunks = -(-size // manifest.chunk_bytes)
    if len(record.crc32c) != chunks:
        raise ValueError(
            f"{where}: expected {chunks} checksums, one for each chunk, got {len(record.crc32c)}. "
            f"{_USE_ANOTHER}"
        )


def _check_coverage(kind: str, name: str, records: list[SliceRecord], elements: int, fix: str) -> None:
    end = 0
    for record in sorted(records, key=lambda record: record.start):
        if record.start != end:
            problem = "stored twice" if record.start < end else "not stored"
            first, last = sorted((record.start, end))
            raise ValueError(f"{kind} of {name!r}: elements {first} to {last} are {problem}. {fix}")
        if record.dtype != records[0].dtype:
            raise ValueError(
                f"{kind} of {name!r}: expected one dtype, got {records[0].dtype} and {record.dtype}. {fix}"
            )
        end = record.start + record.numel
    if end != elements:
        raise ValueError(f"{kind} of {name!r}: elements {end} to {elements} are not stored. {fix}")


def _noun(kind: str) -> str:
    return "buffer" if kind == BUFFER else "parameter"
