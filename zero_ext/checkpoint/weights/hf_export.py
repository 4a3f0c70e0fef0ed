"""Export to Hugging Face's format: safetensors shards and an index, readable without this library."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from zero_ext.checkpoint.format.dtypes import SAFETENSORS_CODES, dtype_named
from zero_ext.checkpoint.format.manifest import BufferRecord, Manifest, ParameterRecord, SliceRecord
from zero_ext.checkpoint.format.memory_order import is_logical_order, to_logical_order
from zero_ext.checkpoint.format.state_source import BUFFER, MASTER
from zero_ext.checkpoint.inspection import open_checkpoint
from zero_ext.checkpoint.transfer.chunk_reader import ChunkReader, ChunkRequest, shard_paths, slice_chunks
from zero_ext.checkpoint.weights.weight_files import LazyTensor, write_weights


def export_huggingface(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    *,
    step: int | None = None,
) -> list[Path]:
    """Write the weights of a checkpoint as `from_pretrained` reads them.

    At most one tensor is in memory at a time, or a chunk of it where memory order is row-major. Of tied names
    only the first is written. Buffers keep their dtype. No file appears under its final name unless all are
    complete.

    Args:
        directory: one checkpoint, or a folder of several.
        out: folder of the new files.
        dtype: of floating-point parameters; None gives each the precision it computes in.
        max_shard_bytes: bytes of tensors in a file at most, but one tensor at least.
        step: number of the checkpoint; default the latest.

    Returns:
        The new files.

    Raises:
        ValueError: another dtype or size, or weights too large for float16.
        CheckpointError: the checkpoint is damaged, or `out` holds exported weights already.

    Examples:
        >>> from zero_ext.checkpoint import export_huggingface
        >>> model, _ = zero_ext.prepare(torch.nn.Linear(4, 2), None, {"stage": 3})
        >>> handle = zero_ext.save_checkpoint("checkpoints", model)
        >>> [path.name for path in export_huggingface("checkpoints", "exported", dtype="bfloat16")]
        ['model.safetensors']
    """
    wanted = _checked_dtype(dtype)
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise ValueError(
            f"max_shard_bytes: expected a whole number of bytes from 1, got {max_shard_bytes!r}. Pass an int."
        )
    path, manifest = open_checkpoint(directory, step)
    weights = stored_weights(path, manifest)
    if wanted is not None:
        floats = [name for name in manifest.parameters if weights[name].dtype.is_floating_point]
        weights |= {name: replace(weights[name], dtype=wanted) for name in floats}
    return write_weights(weights, Path(out).absolute(), max_shard_bytes)


def stored_weights(path: Path, manifest: Manifest) -> dict[str, LazyTensor]:
    """Return the parameters and buffers of a checkpoint by their first names, in the precision they compute
    in. Reading one raises ``CheckpointError`` if its bytes are damaged."""
    records: dict[tuple[str, str], list[SliceRecord]] = {}
    for record in sorted(manifest.slices, key=lambda record: record.start):
        records.setdefault((record.kind, record.name), []).append(record)
    tables: list[tuple[str, Mapping[str, ParameterRecord | BufferRecord]]]
    tables = [(MASTER, manifest.parameters), (BUFFER, manifest.buffers)]
    found = {}
    for kind, name, entry in ((kind, *item) for kind, table in tables for item in table.items()):
        shape = torch.Size(entry.shape)
        in_order = torch.empty(shape, device="meta").stride()
        stride = entry.stride if isinstance(entry, ParameterRecord) else in_order
        chunks = partial(_logical_chunks, path, manifest, records.get((kind, name), ()), shape, stride)
        found[name] = LazyTensor(shape, dtype_named(entry.dtype), chunks)
    return found


def _checked_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None:
        return None
    found = dtype_named(dtype) if isinstance(dtype, str) else dtype
    if found not in SAFETENSORS_CODES or not found.is_floating_point:
        raise ValueError(
            f"dtype: expected float32, bfloat16, float16 or float64, got {dtype!r}. Export as one of these."
        )
    return found


def _logical_chunks(
    path: Path,
    manifest: Manifest,
    records: Sequence[SliceRecord],
    shape: Sequence[int],
    stride: Sequence[int],
) -> Iterable[torch.Tensor]:
    """Return the tensor's elements in logical order."""
    values = _in_memory_order(path, manifest, records)
    if is_logical_order(shape, stride):
        return values
    flat = torch.cat([chunk.clone() for chunk in values])
    return (to_logical_order(flat, shape, stride),)


def _in_memory_order(
    path: Path, manifest: Manifest, records: Sequence[SliceRecord]
) -> Iterator[torch.Tensor]:
    """Yield verified elements, a chunk at a time, each valid until the next."""
    chunks = [
        (chunk, dtype_named(record.dtype))
        for record in records
        for chunk in slice_chunks(record, manifest.chunk_bytes, 0, len(record.crc32c))
    ]
    with ChunkReader(shard_paths(path, manifest)) as reader:
        for chunk_read in reader.read([ChunkRequest(chunk, None) for chunk, _ in chunks]):
            chunk, dtype = chunks[chunk_read.request]
            reader.check(chunk, chunk_read.crc32c)
            yield chunk_read.data.view(dtype)
