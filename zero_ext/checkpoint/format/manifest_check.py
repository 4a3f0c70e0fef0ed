"""Judges a well-typed manifest: do its sizes, runs and files agree with each other and with the disk?

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
from zero_ext.checkpoint.format.manifest import MANIFEST_NAME, Manifest, PieceRecord
from zero_ext.checkpoint.format.memory_order import memory_order
from zero_ext.checkpoint.format.state_source import BUFFER, MASTER


def shard_file_name(rank: int) -> str:
    """The name of a rank's shard file."""
    return f"rank-{rank:05d}.safetensors"


def check_manifest(manifest: Manifest, directory: Path) -> None:
    """CheckpointError naming the manifest, the entry and the values unless every rule holds.

    Files: one for each rank, with the expected name, regular, of the stated size. Tables: dense strides,
    known dtypes, no name used twice. Pieces: inside their file and their tensor, no two over the same bytes,
    together covering each (kind, name) exactly once, with every parameter's value among them.
    """
    path = directory / MANIFEST_NAME
    try:
        _check_files(manifest, directory)
        _check_tables(manifest)
        for index, piece in enumerate(manifest.pieces):
            _check_piece(manifest, index, piece)
        check_disjoint_bytes(manifest)
        check_cover(manifest)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; the checkpoint is damaged or foreign") from None


def tensor_elements(manifest: Manifest, kind: str, name: str) -> int:
    """Elements of the whole tensor that a piece is a run of; ValueError for a name no table lists."""
    table = manifest.buffers if kind == BUFFER else manifest.parameters
    if name not in table:
        raise ValueError(f"{kind} of {name!r} is stored, but no such {_noun(kind)} is listed")
    return math.prod(table[name].shape)


def check_cover(manifest: Manifest) -> None:
    """ValueError unless the pieces of each (kind, name) join without gap or overlap, none missing."""
    runs: dict[tuple[str, str], list[PieceRecord]] = defaultdict(list)
    for piece in manifest.pieces:
        runs[piece.kind, piece.name].append(piece)
    wanted = {(MASTER, name) for name, entry in manifest.parameters.items() if math.prod(entry.shape)}
    wanted |= {(BUFFER, name) for name, entry in manifest.buffers.items() if math.prod(entry.shape)}
    for kind, name in sorted(wanted - runs.keys()):
        raise ValueError(f"{kind} of {name!r} is not stored")
    for (kind, name), pieces in runs.items():
        _check_run(kind, name, pieces, tensor_elements(manifest, kind, name))


def check_disjoint_bytes(manifest: Manifest) -> None:
    """ValueError if two pieces share bytes of a file, or if a file holds bytes that belong to no piece."""
    ends = [entry.header_bytes for entry in manifest.files]
    for piece in sorted(manifest.pieces, key=lambda piece: (piece.file, piece.offset)):
        name = manifest.files[piece.file].name
        if piece.offset != ends[piece.file]:
            raise ValueError(
                f"{name}: {piece.kind} of {piece.name!r} begins at byte {piece.offset}, "
                f"the bytes before it end at {ends[piece.file]}"
            )
        ends[piece.file] += piece_bytes(piece)
    for entry, end in zip(manifest.files, ends, strict=True):
        if end != entry.bytes:
            raise ValueError(f"{entry.name}: its pieces end at byte {end}, the file at {entry.bytes}")


def piece_bytes(piece: PieceRecord) -> int:
    """Stored size of a piece in bytes."""
    return piece.numel * dtype_named(piece.dtype).itemsize


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


def _check_piece(manifest: Manifest, index: int, piece: PieceRecord) -> None:
    where = f"piece {index} ({piece.kind} of {piece.name!r} from element {piece.start})"
    elements = tensor_elements(manifest, piece.kind, piece.name)
    if piece.numel == 0 or piece.start + piece.numel > elements:
        raise ValueError(f"{where} has {piece.numel} elements, its tensor {elements} in all")
    if piece.file >= len(manifest.files):
        raise ValueError(f"{where} is in file {piece.file} of {len(manifest.files)}")
    if piece.kind == BUFFER and piece.dtype != manifest.buffers[piece.name].dtype:
        raise ValueError(f"{where} is {piece.dtype}, its buffer {manifest.buffers[piece.name].dtype}")
    size = piece_bytes(piece)
    if piece.offset + size > manifest.files[piece.file].bytes:
        raise ValueError(f"{where} ends at byte {piece.offset + size}, past the end of its file")
    chunks = -(-size // manifest.chunk_bytes)
    if len(piece.crc32c) != chunks:
        raise ValueError(f"{where} has {len(piece.crc32c)} checksums for {chunks} chunks")


def _check_run(kind: str, name: str, pieces: list[PieceRecord], elements: int) -> None:
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if piece.start != end:
            fault = "twice" if piece.start < end else "not"
            first, last = sorted((piece.start, end))
            raise ValueError(f"{kind} of {name!r}: elements {first} to {last} are stored {fault}")
        if piece.dtype != pieces[0].dtype:
            raise ValueError(f"{kind} of {name!r} is stored as {pieces[0].dtype} and as {piece.dtype}")
        end = piece.start + piece.numel
    if end != elements:
        raise ValueError(f"{kind} of {name!r}: elements {end} to {elements} are not stored")


def _noun(kind: str) -> str:
    return "buffer" if kind == BUFFER else "parameter"
