"""manifest.json: what a checkpoint holds, where, and the checksums that prove it.

The file ends in a checksum of everything before it, which separates damage from a foreign file.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zero_ext.checkpoint.files.checkpoint_error import CheckpointError, brief
from zero_ext.checkpoint.files.safe_open import read_limited
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
    """A contiguous slice of one state tensor, at byte ``offset`` of a file; one checksum for each chunk."""

    file: Count
    kind: Name
    name: str
    start: Count
    numel: Count
    dtype: str
    offset: Count
    crc32c: list[Checksum]


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


def checksum(data: bytes) -> int:
    """CRC32C of bytes."""
    return crc32c(torch.frombuffer(bytearray(data), dtype=torch.uint8)) if data else 0


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the file's bytes: JSON, one top-level key per line, ending in its own checksum.

    Raises:
        ValueError: `read_manifest` would refuse it, because the named states are too large.
    """
    fields = manifest.model_dump()
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
    containers, most = (
        data.count(b"[") + data.count(b"{"),
        _MOST_CONTAINERS + len(data) // _BYTES_PER_CONTAINER,
    )
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
