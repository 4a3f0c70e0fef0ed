"""A rank's shard file: its pieces as 1-D tensors in one safetensors file, streamed from memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from zero_ext.checkpoint.dtypes import dtype_name
from zero_ext.checkpoint.fill_plan import check_piece
from zero_ext.checkpoint.host_memory import byte_view, copy_bytes
from zero_ext.checkpoint.manifest import CHUNK_BYTES, FileRecord, PieceRecord
from zero_ext.checkpoint.manifest_check import shard_file_name
from zero_ext.checkpoint.safetensors_header import TensorEntry, by_alignment, encode_header
from zero_ext.checkpoint.source import BUFFER, Piece
from zero_ext.checkpoint.storage import Storage
from zero_ext.checkpoint.stream_writer import StreamWriter
from zero_ext.ops import host_buffer, pack_
from zero_ext.ops.checksum import crc32c

_STAGING_ALIGNMENT = 64
_PACKED_TOGETHER = (torch.float32, torch.bfloat16, torch.float16)


class OwnedPiece(NamedTuple):
    """A piece to be written: live memory, or a staged copy of it."""

    kind: str
    name: str
    start: int
    tensor: torch.Tensor

    @property
    def key(self) -> str:
        """Its name in the safetensors file, for readers other than this library."""
        return f"{self.name}:{self.kind}:{self.start}"


def owned_pieces(pieces: Iterable[Piece], buffers: Mapping[str, torch.Tensor]) -> list[OwnedPiece]:
    """The pieces and buffers this rank writes, in file order; empty ones take no part.

    ValueError or TypeError names a piece that cannot be stored.
    """
    owned = []
    for piece in pieces:
        check_piece(piece)
        if not piece.kind or piece.kind == BUFFER:
            raise ValueError(f"{piece.name!r}: kind {piece.kind!r} is not a kind of parameter state")
        owned.append(OwnedPiece(piece.kind, piece.name, piece.start, piece.tensor.detach()))
    for name, buffer in buffers.items():
        owned.append(OwnedPiece(BUFFER, name, 0, buffer.detach().cpu().contiguous().reshape(-1)))
    for piece in owned:
        dtype_name(piece.tensor.dtype)
    owned = [piece for piece in owned if piece.tensor.numel()]
    return [owned[index] for index in by_alignment(_entries(owned))]


def stage_pieces(pieces: Sequence[OwnedPiece]) -> list[OwnedPiece]:
    """Copies of the pieces in one host buffer, which goes when they do."""
    offsets, size = [], 0
    for piece in pieces:
        offsets.append(size)
        size += -(-piece.tensor.nbytes // _STAGING_ALIGNMENT) * _STAGING_ALIGNMENT
    buffer = host_buffer(size)
    staged = [
        piece._replace(tensor=buffer[offset : offset + piece.tensor.nbytes].view(piece.tensor.dtype))
        for piece, offset in zip(pieces, offsets, strict=True)
    ]
    for dtype in {piece.tensor.dtype for piece in pieces}:
        of_dtype = [number for number, piece in enumerate(pieces) if piece.tensor.dtype == dtype]
        sources = [pieces[number].tensor for number in of_dtype]
        if dtype in _PACKED_TOGETHER:
            # One parallel pass: a copy for each of many small tensors waits for its threads each time.
            pack_(buffer.view(dtype), sources, [offsets[number] // dtype.itemsize for number in of_dtype])
        else:
            for number, source in zip(of_dtype, sources, strict=True):
                copy_bytes(byte_view(staged[number].tensor), byte_view(source))
    return staged


def write_shard(
    storage: Storage, directory: Path, rank: int, pieces: Sequence[OwnedPiece]
) -> tuple[FileRecord, list[PieceRecord]]:
    """Writes the rank's file and returns what the manifest says of it; every byte is on the disk then."""
    path = directory / shard_file_name(rank)
    header = encode_header(_entries(pieces), {"format": "pt", "content": "zero_ext shard; see manifest.json"})
    header_bytes = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    records, offset = [], len(header)
    with StreamWriter(storage, path) as writer:
        writer.append(header_bytes)
        for piece in pieces:
            checksums = []
            for chunk in byte_view(piece.tensor).split(CHUNK_BYTES):
                writer.append(chunk)
                checksums.append(crc32c(chunk))
            records.append(_record(rank, piece, offset, checksums))
            offset += piece.tensor.nbytes
        writer.finish()
    storage.sync_directory(directory)
    file = FileRecord(
        name=path.name, bytes=offset, header_bytes=len(header), header_crc32c=crc32c(header_bytes)
    )
    return file, records


def _record(rank: int, piece: OwnedPiece, offset: int, checksums: list[int]) -> PieceRecord:
    return PieceRecord(
        file=rank,
        kind=piece.kind,
        name=piece.name,
        start=piece.start,
        numel=piece.tensor.numel(),
        dtype=dtype_name(piece.tensor.dtype),
        offset=offset,
        crc32c=checksums,
    )


def _entries(pieces: Iterable[OwnedPiece]) -> list[TensorEntry]:
    return [TensorEntry(piece.key, piece.tensor.dtype, (piece.tensor.numel(),)) for piece in pieces]
