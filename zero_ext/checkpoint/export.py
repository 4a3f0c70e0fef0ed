"""Export to Hugging Face's format: safetensors shards and an index, readable without this library."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zero_ext.checkpoint.chunk_reader import ChunkReader, Read, piece_chunks, shard_paths
from zero_ext.checkpoint.dtypes import SAFETENSORS_CODES, dtype_named
from zero_ext.checkpoint.errors import CheckpointError
from zero_ext.checkpoint.host_memory import byte_view
from zero_ext.checkpoint.inspect import open_checkpoint
from zero_ext.checkpoint.manifest import Manifest, PieceRecord
from zero_ext.checkpoint.memory_order import is_logical_order, to_logical_order
from zero_ext.checkpoint.safetensors_header import TensorEntry, encode_header
from zero_ext.checkpoint.source import BUFFER, MASTER
from zero_ext.checkpoint.storage import Storage
from zero_ext.checkpoint.stream_writer import StreamWriter

_SINGLE_NAME = "model.safetensors"
_INDEX_NAME = "model.safetensors.index.json"
_PARTIAL = ".partial-"


def export_huggingface(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    *,
    step: int | None = None,
) -> list[Path]:
    """Writes the model's weights of a checkpoint to ``out`` as ``from_pretrained`` reads them; the new files.

    ``dtype`` is what floating-point parameters become; None gives each the precision it computes in.
    Buffers keep theirs. A file holds ``max_shard_bytes`` of tensors at most, but one tensor at least. Of
    tied names only the first is written. What is held in memory at a time is one tensor, or a chunk of it
    where memory order is row-major. ``directory`` and ``step`` are those of ``inspect_checkpoint``.

    ValueError for another dtype or size, or weights too large for float16; CheckpointError for a damaged
    checkpoint or an ``out`` that holds exported weights already. No file appears under its final name unless
    all are whole.
    """
    wanted = _checked_dtype(dtype)
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes!r}; give a number of bytes from 1")
    path, manifest = open_checkpoint(directory, step)
    target = Path(out).absolute()
    _refuse_exported(target)
    shards = _split(_tensors(manifest, wanted), max_shard_bytes)
    names = _shard_names(len(shards))
    storage = Storage()
    storage.make_directory(target)
    written: list[Path] = []
    try:
        with ChunkReader(shard_paths(path, manifest)) as reader:
            for name, shard in zip(names, shards, strict=True):
                written.append(target / (_PARTIAL + name))
                _write_shard(storage, reader, manifest, written[-1], shard)
        if len(shards) > 1:
            written.append(target / (_PARTIAL + _INDEX_NAME))
            storage.write_file(written[-1], _index(names, shards))
        return _publish(storage, target, written)
    finally:
        for partial in written:
            storage.remove(partial)


@dataclass(frozen=True)
class _Tensor:
    """A tensor to write: where it comes from, and as what it goes out."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    pieces: Sequence[PieceRecord]
    dtype: torch.dtype

    @property
    def entry(self) -> TensorEntry:
        return TensorEntry(self.name, self.dtype, self.shape)


def _checked_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None:
        return None
    found = dtype_named(dtype) if isinstance(dtype, str) else dtype
    if found not in SAFETENSORS_CODES or not found.is_floating_point:
        raise ValueError(f"dtype is {dtype!r}; weights can go out as float32, bfloat16, float16 or float64")
    return found


def _refuse_exported(target: Path) -> None:
    found = sorted(target.glob("model*.safetensors")) + sorted(target.glob(_INDEX_NAME))
    if found:
        raise CheckpointError(
            f"{found[0]} exists; remove the exported weights there or give another directory"
        )


def _tensors(manifest: Manifest, dtype: torch.dtype | None) -> list[_Tensor]:
    pieces: dict[tuple[str, str], list[PieceRecord]] = {}
    for piece in sorted(manifest.pieces, key=lambda piece: piece.start):
        pieces.setdefault((piece.kind, piece.name), []).append(piece)
    tensors = []
    for name, entry in manifest.parameters.items():
        own = dtype_named(entry.dtype)
        out = dtype if dtype is not None and own.is_floating_point else own
        shape, stride = tuple(entry.shape), tuple(entry.stride)
        tensors.append(_Tensor(name, shape, stride, pieces.get((MASTER, name), ()), out))
    for name, buffer in manifest.buffers.items():
        shape = tuple(buffer.shape)
        stride = torch.empty(shape, device="meta").stride()
        tensors.append(
            _Tensor(name, shape, stride, pieces.get((BUFFER, name), ()), dtype_named(buffer.dtype))
        )
    return tensors


def _split(tensors: Sequence[_Tensor], limit: int) -> list[list[_Tensor]]:
    shards: list[list[_Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.entry.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.entry.nbytes
    # Readers want each tensor at its own alignment; wider elements first gives it without holes.
    return [sorted(shard, key=lambda tensor: -tensor.dtype.itemsize) for shard in shards]


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [_SINGLE_NAME]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _index(names: Sequence[str], shards: Sequence[Sequence[_Tensor]]) -> bytes:
    weight_map: Mapping[str, str] = {
        tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard
    }
    total = sum(tensor.entry.nbytes for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def _write_shard(
    storage: Storage, reader: ChunkReader, manifest: Manifest, path: Path, tensors: Sequence[_Tensor]
) -> None:
    storage.remove(path)
    with StreamWriter(storage, path) as writer:
        header = encode_header([tensor.entry for tensor in tensors], {"format": "pt"})
        writer.append(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for tensor in tensors:
            parts = _values(reader, manifest, tensor)
            if not is_logical_order(tensor.shape, tensor.stride):
                whole = torch.cat([part.clone() for part in parts])
                parts = iter([to_logical_order(whole, tensor.shape, tensor.stride)])
            for part in parts:
                writer.append(byte_view(_cast(tensor.name, part, tensor.dtype)))
        writer.finish()


def _cast(name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = values.to(dtype)
    if dtype == torch.float16 and bool((cast.isinf() & values.isfinite()).any()):
        raise ValueError(f"{name!r} holds values beyond float16's range; export as bfloat16 or float32")
    return cast


def _values(reader: ChunkReader, manifest: Manifest, tensor: _Tensor) -> Iterator[torch.Tensor]:
    """The tensor's elements in memory order, verified, a chunk at a time, each valid until the next."""
    chunks = [
        (chunk, dtype_named(piece.dtype))
        for piece in tensor.pieces
        for chunk in piece_chunks(piece, manifest.chunk_bytes, 0, len(piece.crc32c))
    ]
    for arrived in reader.read([Read(chunk, None) for chunk, _ in chunks]):
        chunk, dtype = chunks[arrived.request]
        reader.check(chunk, arrived.crc32c)
        yield arrived.data.view(dtype)


def _publish(storage: Storage, target: Path, partial: Sequence[Path]) -> list[Path]:
    """Final names, the index last: a reader that finds it finds everything it lists."""
    published = []
    for path in partial:
        final = target / path.name.removeprefix(_PARTIAL)
        storage.rename(path, final)
        published.append(final)
    storage.sync_directory(target)
    return published
