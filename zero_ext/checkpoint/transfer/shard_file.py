"""A rank's shard file: its pieces as 1-D tensors in one safetensors file, streamed from where they live."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from zero_ext.checkpoint.files.filesystem import Storage
from zero_ext.checkpoint.files.raw_buffers import byte_view, copy_bytes
from zero_ext.checkpoint.format.dtypes import dtype_name
from zero_ext.checkpoint.format.manifest import CHUNK_BYTES, FileRecord, PieceRecord
from zero_ext.checkpoint.format.manifest_check import shard_file_name
from zero_ext.checkpoint.format.safetensors_header import TensorEntry, by_alignment, encode_header
from zero_ext.checkpoint.format.state_source import BUFFER, Piece, StoredValues
from zero_ext.checkpoint.transfer.device_staging import DeviceStaging
from zero_ext.checkpoint.transfer.piece_io import byte_count, element_count, read_stored
from zero_ext.checkpoint.transfer.read_plan import check_piece
from zero_ext.checkpoint.transfer.stream_writer import StreamWriter
from zero_ext.ops import host_buffer, pack_
from zero_ext.ops.storage.checksum import crc32c

_STAGING_ALIGNMENT = 64
_PACKED_TOGETHER = (torch.float32, torch.bfloat16, torch.float16)


class OwnedPiece(NamedTuple):
    """A piece to be written: live memory of host or device, a staged copy of it, or values in a store."""

    kind: str
    name: str
    start: int
    values: torch.Tensor | StoredValues

    @property
    def key(self) -> str:
        """Its name in the safetensors file, for readers other than this library."""
        return f"{self.name}:{self.kind}:{self.start}"

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
        """Whether it has to be read from a store."""
        return not isinstance(self.values, torch.Tensor)

    def chunks(self, staging: DeviceStaging) -> Iterator[torch.Tensor]:
        """Its bytes in host memory, as uint8 runs of CHUNK_BYTES at most, each valid until the next one; what
        lies on a device comes through ``staging``, stored values are in memory two runs at a time."""
        values = self.values
        if isinstance(values, torch.Tensor):
            on_host = values.device.type == "cpu"
            for part in (byte_view(values),) if on_host else staging.read(values):
                yield from part.split(CHUNK_BYTES)
            return
        elements = CHUNK_BYTES // values.dtype.itemsize
        for begin in range(0, self.numel, elements):
            end = min(begin + elements, self.numel)
            yield byte_view(read_stored(values, begin, end, f"{self.kind} of {self.name!r}"))


def owned_pieces(pieces: Iterable[Piece], buffers: Mapping[str, torch.Tensor]) -> list[OwnedPiece]:
    """The pieces and buffers this rank writes, in file order; empty ones take no part.

    ValueError or TypeError names a piece that cannot be stored.
    """
    owned = []
    for piece in pieces:
        check_piece(piece)
        if not piece.kind or piece.kind == BUFFER:
            raise ValueError(f"{piece.name!r}: kind {piece.kind!r} is not a kind of parameter state")
        values = piece.tensor.detach() if isinstance(piece.tensor, torch.Tensor) else piece.tensor
        owned.append(OwnedPiece(piece.kind, piece.name, piece.start, values))
    for name, buffer in buffers.items():
        owned.append(OwnedPiece(BUFFER, name, 0, buffer.detach().cpu().contiguous().reshape(-1)))
    for run in owned:
        _check_dtype(run)
    owned = [run for run in owned if run.numel]
    return [owned[index] for index in by_alignment(_entries(owned))]


def stage_pieces(pieces: Sequence[OwnedPiece]) -> list[OwnedPiece]:
    """Copies of the pieces in one host buffer, which goes when they do. ValueError if one is in a store."""
    tensors = [_in_memory(piece) for piece in pieces]
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
        for part in staging.read(tensors[number]):
            copy_bytes(rest[: part.numel()], part)
            rest = rest[part.numel() :]
    for dtype in {tensors[number].dtype for number in on_host}:
        of_dtype = [number for number in on_host if tensors[number].dtype == dtype]
        sources = [tensors[number] for number in of_dtype]
        if dtype in _PACKED_TOGETHER:
            # One parallel pass: a copy for each of many small tensors waits for its threads each time.
            pack_(buffer.view(dtype), sources, [offsets[number] // dtype.itemsize for number in of_dtype])
        else:
            for number, source in zip(of_dtype, sources, strict=True):
                copy_bytes(byte_view(staged[number]), byte_view(source))
    return [piece._replace(values=copy) for piece, copy in zip(pieces, staged, strict=True)]


def write_shard(
    storage: Storage, directory: Path, rank: int, pieces: Sequence[OwnedPiece]
) -> tuple[FileRecord, list[PieceRecord]]:
    """Writes the rank's file and returns what the manifest says of it; every byte is on the disk then.

    While a chunk is read from a store or a device and hashed, those before it are being written.
    CheckpointError names a piece whose store cannot be read.
    """
    path = directory / shard_file_name(rank)
    header = encode_header(_entries(pieces), {"format": "pt", "content": "zero_ext shard; see manifest.json"})
    header_bytes = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    records, offset = [], len(header)
    staging = DeviceStaging()
    with StreamWriter(storage, path) as writer:
        writer.append(header_bytes)
        for piece in pieces:
            checksums = []
            for chunk in piece.chunks(staging):
                writer.append(chunk)
                checksums.append(crc32c(chunk))
            records.append(_record(rank, piece, offset, checksums))
            offset += piece.nbytes
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
        numel=piece.numel,
        dtype=dtype_name(piece.values.dtype),
        offset=offset,
        crc32c=checksums,
    )


def _entries(pieces: Iterable[OwnedPiece]) -> list[TensorEntry]:
    return [TensorEntry(piece.key, piece.values.dtype, (piece.numel,)) for piece in pieces]


def _check_dtype(piece: OwnedPiece) -> None:
    try:
        dtype_name(piece.values.dtype)
    except ValueError as error:
        raise ValueError(f"{piece.kind} of {piece.name!r}: {error}") from None


def _in_memory(piece: OwnedPiece) -> torch.Tensor:
    if not isinstance(piece.values, torch.Tensor):
        raise ValueError(f"{piece.kind} of {piece.name!r} is in a store; only pieces in memory can be staged")
    return piece.values
