"""Full weights in files that are read without this library: safetensors, or pickles of torch's."""

from __future__ import annotations

import json
import math
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from zero_ext.checkpoint.chunk_reader import ChunkReader, ChunkRequest, shard_paths, slice_chunks
from zero_ext.checkpoint.files import CheckpointError, Filesystem, byte_view
from zero_ext.checkpoint.format.manifest import Manifest, ParameterRecord, SliceRecord, slices_by_tensor
from zero_ext.checkpoint.format.tensor_files import (
    SAFETENSORS_CODES,
    TensorEntry,
    dtype_named,
    encode_header,
    is_logical_order,
    read_header,
    row_major,
    to_logical_order,
)
from zero_ext.checkpoint.inspection import open_checkpoint
from zero_ext.checkpoint.shard_file import StreamWriter

_PARTIAL = ".partial-"
_OWN_NAMES = r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?"


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
    records = slices_by_tensor(manifest)
    found = {}
    for kind, name, entry in manifest.tensors():
        shape = torch.Size(entry.shape)
        stride = entry.stride if isinstance(entry, ParameterRecord) else row_major(shape)
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
    return (to_logical_order(torch.cat([chunk.clone() for chunk in values]), shape, stride),)


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
        for number, data in reader.verified([ChunkRequest(chunk, None) for chunk, _ in chunks]):
            yield data.view(chunks[number][1])


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor with values that are read when they are asked for.

    ``chunks`` gives them in row-major order, a chunk at a time, each valid until the next one. They become
    ``dtype``.
    """

    shape: torch.Size
    dtype: torch.dtype
    chunks: Callable[[], Iterable[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return self.shape.numel() * self.dtype.itemsize

    def contiguous(self) -> torch.Tensor:
        """Return a new tensor with the values."""
        found = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        flat, begin = found.view(-1), 0
        for chunk in self.chunks():
            flat[begin : begin + chunk.numel()].copy_(chunk.reshape(-1))
            begin += chunk.numel()
        return found


Weights = Mapping[str, torch.Tensor | LazyTensor]


def write_weights(
    weights: Weights, out: Path, most_bytes: int, pickled: bool = False, replaces: bool = False
) -> list[Path]:
    """Write weights to a folder as Hugging Face's libraries read them, and return the new files.

    A file holds ``most_bytes`` of tensors, but one tensor at least. One tensor is in memory at a time, or one
    chunk of a lazy one. ``pickled`` writes ``pytorch_model.bin``, for ``torch.load``, and else
    ``model.safetensors``, which hold what has several names under the first of them. Several files get an
    index. ValueError for values beyond float16's range or a dtype that safetensors lack, CheckpointError if
    ``out`` holds weights already, unless these are to replace them.
    """
    stem, suffix = ("pytorch_model", ".bin") if pickled else ("model", ".safetensors")
    index = f"{stem}{suffix}.index.json"
    found = sorted(out.glob(f"{stem}*{suffix}")) + sorted(out.glob(index))
    if found and not replaces:
        raise CheckpointError(
            f"{found[0]}: it exists already. Remove the exported weights there, or pass another directory."
        )
    shards = _split(weights if pickled else first_names(weights), most_bytes)
    names = [f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [f"{stem}{suffix}"]
    filesystem = Filesystem()
    filesystem.make_directory(out)
    written: list[Path] = []
    replacing = False
    try:
        for name, shard in zip(names, shards, strict=True):
            written.append(out / (_PARTIAL + name))
            write_file(filesystem, written[-1], shard, pickled)
        if len(shards) > 1:
            written.append(out / (_PARTIAL + index))
            filesystem.remove(written[-1])
            filesystem.write_file(written[-1], _index(names, shards))
        replacing = bool(found)
        published = _publish(filesystem, written)
    except BaseException:
        # Once old files may be gone, new ones stay, those without their final name too.
        for partial in () if replacing else written:
            filesystem.remove(partial)
        raise
    for path in found:
        if path not in published and re.fullmatch(_OWN_NAMES, path.name):
            filesystem.remove(path)
    return published


def write_file(filesystem: Filesystem, path: Path, weights: Weights, pickled: bool) -> None:
    """Write tensors to one new file, which is on the disk then.

    Errors are those of :func:`write_weights`. What they leave at ``path`` is the caller's to remove.
    """
    filesystem.remove(path)
    if pickled:
        _write_pickle(filesystem, path, weights)
    else:
        _write_safetensors(filesystem, path, first_names(weights))


def first_names(weights: Weights) -> Weights:
    """Return each tensor under the first of its names."""
    first = {id(weights[name]): name for name in reversed(list(weights))}
    return {name: value for name, value in weights.items() if first[id(value)] == name}


def _split(weights: Weights, limit: int) -> list[dict[str, torch.Tensor | LazyTensor]]:
    """Return the tensors of each file, all names of one tensor in the same."""
    names: dict[int, list[str]] = {}
    for name, value in weights.items():
        names.setdefault(id(value), []).append(name)
    shards: list[dict[str, torch.Tensor | LazyTensor]] = [{}]
    size = 0
    for own in names.values():
        added = weights[own[0]].nbytes
        if shards[-1] and size + added > limit:
            shards.append({})
            size = 0
        shards[-1].update(dict.fromkeys(own, weights[own[0]]))
        size += added
    return shards


def _index(names: Sequence[str], shards: Sequence[Weights]) -> bytes:
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    total = sum(value.nbytes for shard in shards for value in first_names(shard).values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def _write_safetensors(filesystem: Filesystem, path: Path, weights: Weights) -> None:
    for name, value in weights.items():
        if value.dtype not in SAFETENSORS_CODES:
            raise ValueError(
                f"{name}: expected a dtype that safetensors has, got {value.dtype}. Pass another file name."
            )
    entries = [TensorEntry(name, value.dtype, tuple(value.shape)) for name, value in weights.items()]
    entries.sort(key=lambda entry: -entry.dtype.itemsize)  # readers want each tensor at its own alignment
    with StreamWriter(filesystem, path) as writer:
        header = encode_header(entries, {"format": "pt"})
        writer.append(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for entry in entries:
            value = weights[entry.key]
            for chunk in value.chunks() if isinstance(value, LazyTensor) else (value,):
                writer.append(byte_view(_cast(entry.key, chunk.contiguous(), entry.dtype)))
        writer.finish()


def _write_pickle(filesystem: Filesystem, path: Path, weights: Weights) -> None:
    """Lazy tensors go through a file of their bytes, which is mapped: torch wants all of them together."""
    raw = path.with_name(f"{path.name}-values")
    lazy = {name: value for name, value in first_names(weights).items() if isinstance(value, LazyTensor)}
    tensors: dict[int, torch.Tensor] = {}
    try:
        if lazy:
            write_file(filesystem, raw, lazy, pickled=False)
            with raw.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            for (name, dtype, shape), offset in read_header(raw):
                flat = torch.empty(0, dtype=dtype, device="cpu")
                if math.prod(shape):
                    flat = torch.frombuffer(mapped, dtype=dtype, count=math.prod(shape), offset=offset)
                tensors[id(lazy[name])] = flat.view(shape)
        # Exclusive: the target of a symbolic link that somebody else puts here is not overwritten.
        with path.open("xb") as file:
            torch.save({name: tensors.get(id(value), value) for name, value in weights.items()}, file)
            file.flush()
            os.fsync(file.fileno())
    finally:
        filesystem.remove(raw)


def _cast(name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = values.to(dtype)
    if dtype == torch.float16 and bool((cast.isinf() & values.isfinite()).any()):
        raise ValueError(f"{name!r}: its values are beyond float16's range. Export as bfloat16 or float32.")
    return cast


def _publish(filesystem: Filesystem, partial: Sequence[Path]) -> list[Path]:
    """Give the files their final names, the index last: a reader that finds it finds everything it lists."""
    published = []
    for path in partial:
        published.append(path.with_name(path.name.removeprefix(_PARTIAL)))
        filesystem.rename(path, published[-1])
    filesystem.sync_directory(published[-1].parent)
    return published
