"""manifest.json: what a checkpoint holds, where, and the checksums that prove it."""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zero_ext.checkpoint.files import CheckpointError, brief, read_limited
from zero_ext.checkpoint.format.state_source import BUFFER, MASTER
from zero_ext.checkpoint.format.tensor_files import dtype_named, memory_order
from zero_ext.ops.storage import crc32c

MANIFEST_NAME = "manifest.json"
FORMAT: Literal["zero_ext checkpoint"] = "zero_ext checkpoint"
VERSION: Literal[1] = 1
CHUNK_BYTES = 1 << 20
LARGEST_CHUNK_BYTES = 64 << 20
LARGEST_MANIFEST_BYTES = 512 << 20
_BYTES_FOR_NAMED_STATES = 64 << 20
_BYTES_PER_SHARD_BYTE = 4  # reached by parameters of one element
_MOST_CONTAINERS = 1 << 20
_BYTES_PER_CONTAINER = 16
_TRAILER = re.compile(rb',\n"manifest_crc32c": "([0-9a-f]{8})"}\n')
_TRAILER_BYTES = len(b',\n"manifest_crc32c": "00000000"}\n')

Count = Annotated[int, Field(ge=0, lt=1 << 62)]
Checksum = Annotated[int, Field(ge=0, lt=1 << 32)]
Name = Annotated[str, Field(min_length=1)]
Sizes = Annotated[list[Count], Field(max_length=64)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ParameterRecord(_Record):
    """A full parameter. ``dtype`` is the compute precision; the slices say how it is stored."""

    shape: Sizes
    stride: Sizes
    dtype: str
    aliases: list[str]
    trainable: bool


class BufferRecord(_Record):
    """A module buffer, stored in row-major order."""

    shape: Sizes
    dtype: str


class FileRecord(_Record):
    """One rank's shard file; ``header_bytes`` is where its tensors begin."""

    name: str
    bytes: Count
    header_bytes: Count
    header_crc32c: Checksum


class SliceRecord(_Record):
    """A contiguous slice of one state tensor, at byte ``offset`` of a file; one checksum for each chunk.

    With a ``shape`` it is all of a tensor with this shape, else elements of one with the parameter's shape.
    """

    file: Count
    kind: Name
    name: str
    start: Count
    numel: Count
    dtype: str
    offset: Count
    crc32c: list[Checksum]
    shape: Sizes | None = None


class Manifest(_Record):
    """The whole table of a checkpoint; see docs/reference/checkpoint_format.md for every key."""

    format: Literal["zero_ext checkpoint"]
    version: Literal[1]
    step: Count
    world_size: Annotated[int, Field(ge=1, lt=1 << 31)]
    mesh: dict[str, Count]
    chunk_bytes: Annotated[int, Field(ge=4096, le=LARGEST_CHUNK_BYTES, multiple_of=4096)]
    parameters: dict[str, ParameterRecord]
    buffers: dict[str, BufferRecord]
    files: list[FileRecord]
    slices: list[SliceRecord]
    scalar_state: dict[str, Any]
    client_state: Any
    extra: dict[str, Any]

    def tensors(self) -> Iterator[tuple[str, str, ParameterRecord | BufferRecord]]:
        """Yield kind, name and record of each parameter's value and of each buffer."""
        yield from ((MASTER, name, parameter) for name, parameter in self.parameters.items())
        yield from ((BUFFER, name, buffer) for name, buffer in self.buffers.items())


def checksum(data: bytes) -> int:
    """CRC32C of bytes."""
    return crc32c(torch.frombuffer(bytearray(data), dtype=torch.uint8)) if data else 0


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the file's bytes: JSON, one top-level key per line, ending in its own checksum.

    Raises:
        ValueError: `read_manifest` would refuse it, because the named states are too large.
    """
    # Without the shape that most slices do not have.
    fields = manifest.model_dump(exclude_defaults=True)
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, allow_nan=False, separators=(',', ':'))}"
        for key, value in fields.items()
    ]
    body = ("{" + ",\n".join(lines)).encode()
    problem = _oversize(body, sum(entry.bytes for entry in manifest.files))
    if problem is not None:
        raise ValueError(
            f"client_state and extra: {problem}. Store large states in files of their own, or as buffers."
        )
    return body + b',\n"manifest_crc32c": "%08x"}\n' % checksum(body)


def read_manifest(directory: Path) -> tuple[Manifest, int]:
    """Return the manifest of a checkpoint directory and its checksum; ``check_manifest`` judges its content.

    CheckpointError names the file and what is wrong: missing, too large, damaged, foreign, or of a version
    that this library does not support.
    """
    path = directory / MANIFEST_NAME
    data = _read(path)
    trailer = _TRAILER.fullmatch(data[-_TRAILER_BYTES:])
    if trailer is None:
        raise CheckpointError(
            f"{path}: it does not end as a zero_ext manifest does. Use another checkpoint, since this file "
            "is truncated or another program's."
        )
    body = data[:-_TRAILER_BYTES]
    seen, wanted = checksum(body), int(trailer[1], 16)
    if seen != wanted:
        raise CheckpointError(
            f"{path}: damaged: expected CRC32C {wanted:08x}, as it says, got {seen:08x}. Use another "
            "checkpoint."
        )
    fields = _parse(body + b"}", path)
    _check_version(fields, path)
    try:
        return Manifest.model_validate(fields), seen
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(str(item) for item in problem["loc"])
        raise CheckpointError(
            f"{path}: {where}: {problem['msg']}, got {brief(problem['input'])}. Use another checkpoint."
        ) from None


def _read(path: Path) -> bytes:
    try:
        shard_bytes = sum(shard.stat().st_size for shard in path.parent.glob("rank-*.safetensors"))
        data = read_limited(path, _most_bytes(shard_bytes) + 1)
    except OSError as error:
        raise CheckpointError(
            f"{path}: it cannot be read: {error.strerror}. Check that this is a checkpoint."
        ) from error
    problem = _oversize(data, shard_bytes)
    if problem is not None:
        raise CheckpointError(f"{path}: {problem}. Use another checkpoint, since this is no manifest.")
    return data


def _most_bytes(shard_bytes: int) -> int:
    """Return the largest manifest besides shard files of `shard_bytes` bytes in all."""
    return min(_BYTES_FOR_NAMED_STATES + _BYTES_PER_SHARD_BYTE * shard_bytes, LARGEST_MANIFEST_BYTES)


def _oversize(data: bytes, shard_bytes: int) -> str | None:
    """Return why a manifest would take too much memory, or None.

    An empty list takes 3 bytes as JSON and 72 in memory, so the lists and objects are counted too.
    """
    most_bytes = _most_bytes(shard_bytes)
    if len(data) > most_bytes:
        return (
            f"manifest: expected at most {most_bytes} bytes besides {shard_bytes} bytes of shards, got more"
        )
    containers = data.count(b"[") + data.count(b"{")
    most = _MOST_CONTAINERS + len(data) // _BYTES_PER_CONTAINER
    if containers > most:
        return f"manifest: expected at most {most} lists and objects, got {containers}"
    return None


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(
            text,
            parse_constant=partial(_refuse_constant, path),
            object_pairs_hook=partial(_refuse_duplicates, path),
        )
    except RecursionError:
        raise CheckpointError(f"{path}: it is nested too deeply. Use another checkpoint.") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: it is not valid JSON: {error}. Use another checkpoint.") from None
    if not isinstance(fields, dict):
        raise CheckpointError(
            f"{path}: expected a JSON object, got {type(fields).__name__}. Use another checkpoint."
        )
    return fields


def _check_version(fields: dict[str, Any], path: Path) -> None:
    if fields.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: format: expected {FORMAT!r}, got {brief(fields.get('format'))}. Use another checkpoint."
        )
    version = fields.get("version")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(
            f"{path}: version: expected {VERSION}, which this zero_ext reads, got {brief(version)}. "
            "Load it with the release that wrote it."
        )


def _refuse_constant(path: Path, name: str) -> object:
    raise CheckpointError(f"{path}: expected JSON numbers, got {name}. Use another checkpoint.")


def _refuse_duplicates(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise CheckpointError(
                    f"{path}: key {brief(key)} occurs twice in one object. Use another checkpoint."
                )
            seen.add(key)
    return found


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


def tensor_elements(manifest: Manifest, record: SliceRecord, fix: str = _USE_ANOTHER) -> int:
    """Return elements of the full tensor of a slice; ValueError, ending in ``fix``, for a name that no table
    lists."""
    kind, name = record.kind, record.name
    table = manifest.buffers if kind == BUFFER else manifest.parameters
    if name not in table:
        noun = "buffer" if kind == BUFFER else "parameter"
        raise ValueError(f"{kind} of {name!r}: it is stored, but no such {noun} is listed. {fix}")
    return math.prod(table[name].shape if record.shape is None else record.shape)


def slices_by_tensor(manifest: Manifest) -> dict[tuple[str, str], list[SliceRecord]]:
    """Return the slices of each (kind, name), in the order of their elements."""
    found: dict[tuple[str, str], list[SliceRecord]] = {}
    for record in sorted(manifest.slices, key=lambda record: record.start):
        found.setdefault((record.kind, record.name), []).append(record)
    return found


def check_cover(manifest: Manifest, fix: str = _SAVE_ONCE) -> None:
    """ValueError, ending in ``fix``, unless the slices of each tensor join without gap or overlap."""
    by_tensor = slices_by_tensor(manifest)
    wanted = {(kind, name) for kind, name, entry in manifest.tensors() if math.prod(entry.shape)}
    for kind, name in sorted(wanted - by_tensor.keys()):
        raise ValueError(f"{kind} of {name!r}: it is not stored. {fix}")
    for (kind, name), records in by_tensor.items():
        elements, end = tensor_elements(manifest, records[0], fix), 0
        if len(records) > 1 and any(record.shape is not None for record in records):
            raise ValueError(f"{kind} of {name!r}: it has a shape of its own and is stored twice. {fix}")
        for record in records:
            if record.start != end:
                problem = "stored twice" if record.start < end else "not stored"
                first, last = sorted((record.start, end))
                raise ValueError(f"{kind} of {name!r}: elements {first} to {last} are {problem}. {fix}")
            if record.dtype != records[0].dtype:
                both = f"{records[0].dtype} and {record.dtype}"
                raise _unexpected(f"{kind} of {name!r}", "one dtype", both, fix)
            end += record.numel
        if end != elements:
            raise ValueError(f"{kind} of {name!r}: elements {end} to {elements} are not stored. {fix}")


def check_disjoint_bytes(manifest: Manifest, fix: str = _WRITE_AGAIN) -> None:
    """ValueError, ending in ``fix``, if slices share bytes of a file, or some belong to no slice."""
    ends = [entry.header_bytes for entry in manifest.files]
    for record in sorted(manifest.slices, key=lambda record: (record.file, record.offset)):
        end = ends[record.file]
        if record.offset != end:
            subject = f"{manifest.files[record.file].name}: {record.kind} of {record.name!r}"
            expected = f"its first byte at {end}, where the bytes before it end"
            raise _unexpected(subject, expected, record.offset, fix)
        ends[record.file] += slice_bytes(record)
    for entry, end in zip(manifest.files, ends, strict=True):
        if end != entry.bytes:
            expected = f"the end of its slices at byte {entry.bytes}, the end of the file"
            raise _unexpected(entry.name, expected, end, fix)


def slice_bytes(record: SliceRecord) -> int:
    """Return the stored size of a slice in bytes."""
    return record.numel * dtype_named(record.dtype).itemsize


def _unexpected(subject: str, expected: str, got: object, fix: str = _USE_ANOTHER) -> ValueError:
    return ValueError(f"{subject}: expected {expected}, got {got}. {fix}")


def _check_files(manifest: Manifest, directory: Path) -> None:
    if len(manifest.files) != manifest.world_size:
        expected = f"{manifest.world_size}, one for each rank of the world size"
        raise _unexpected("files", expected, len(manifest.files))
    for rank, entry in enumerate(manifest.files):
        if entry.name != shard_file_name(rank):
            raise _unexpected(f"file {rank}", f"the name {shard_file_name(rank)!r}", repr(entry.name))
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
            fix = "Use another checkpoint, since the file was truncated or replaced."
            raise _unexpected(entry.name, f"{entry.bytes} bytes", found.st_size, fix)


def _check_tables(manifest: Manifest) -> None:
    names: set[str] = set()
    for name, parameter in manifest.parameters.items():
        for known in (name, *parameter.aliases):
            if known in names:
                raise ValueError(f"parameter name {known!r}: it is listed twice. {_USE_ANOTHER}")
            names.add(known)
    for _, name, entry in manifest.tensors():
        dtype_named(entry.dtype)
        if math.prod(entry.shape) >= 1 << 60:
            expected = "fewer elements than the largest memory holds"
            raise _unexpected(repr(name), expected, f"shape {entry.shape}")
        if isinstance(entry, ParameterRecord):
            try:
                memory_order(entry.shape, entry.stride)
            except ValueError as error:
                raise ValueError(f"parameters[{name!r}]: {error}") from None


def _check_slice(manifest: Manifest, index: int, record: SliceRecord) -> None:
    where = f"slice {index} ({record.kind} of {record.name!r} from element {record.start})"
    elements = tensor_elements(manifest, record)
    if record.shape is not None:
        if record.kind in (MASTER, BUFFER):
            raise _unexpected(where, "the shape that its table lists", f"another shape {record.shape}")
        if (record.start, record.numel) != (0, elements):
            raise _unexpected(where, f"all {elements} elements of shape {record.shape}", record.numel)
    elif record.numel == 0 or record.start + record.numel > elements:
        expected = f"1 to {elements - record.start} elements, which end with its tensor of {elements}"
        raise _unexpected(where, expected, record.numel)
    if record.file >= len(manifest.files):
        raise _unexpected(where, f"a file below {len(manifest.files)}, the number of files", record.file)
    if record.kind == BUFFER and record.dtype != manifest.buffers[record.name].dtype:
        expected = f"{manifest.buffers[record.name].dtype}, the dtype of its buffer"
        raise _unexpected(where, expected, record.dtype)
    end, file_bytes = record.offset + slice_bytes(record), manifest.files[record.file].bytes
    if end > file_bytes:
        raise _unexpected(where, f"an end within its file of {file_bytes} bytes", f"byte {end}")
    chunks = -(-slice_bytes(record) // manifest.chunk_bytes)
    if len(record.crc32c) != chunks:
        raise _unexpected(where, f"{chunks} checksums, one for each chunk", len(record.crc32c))
