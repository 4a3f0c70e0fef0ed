"""Full weights in files that are read without this library: safetensors, or pickles of torch's."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zero_ext.checkpoint.files.checkpoint_error import CheckpointError
from zero_ext.checkpoint.files.filesystem import Filesystem
from zero_ext.checkpoint.files.raw_buffers import byte_view
from zero_ext.checkpoint.format.dtypes import SAFETENSORS_CODES
from zero_ext.checkpoint.format.safetensors_header import (
    TensorEntry,
    by_alignment,
    encode_header,
    read_header,
)
from zero_ext.checkpoint.transfer.stream_writer import StreamWriter

_PARTIAL = ".partial-"


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor with values that are read when they are asked for.

    ``chunks`` gives them in row-major order, a chunk at a time, each valid until the next one. They become
    ``dtype``.
    """

    shape: torch.Size
    dtype: torch.dtype
    chunks: Callable[[], Iterable[torch.Tensor]]

    def contiguous(self) -> torch.Tensor:
        """Return a new tensor with the values."""
        found = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        flat, begin = found.view(-1), 0
        for chunk in self.chunks():
            flat[begin : begin + chunk.numel()].copy_(chunk.reshape(-1))
            begin += chunk.numel()
        return found


Weights = Mapping[str, torch.Tensor | LazyTensor]


def write_weights(weights: Weights, out: Path, most_bytes: int, pickled: bool = False) -> list[Path]:
    """Write weights to a folder as Hugging Face's libraries read them.

    One tensor is in memory at a time, or one chunk of a lazy one.

    Args:
        weights: tensors by name. Safetensors hold what has several names under the first of them.
        out: the folder, made if there is none.
        most_bytes: how much of tensors a file holds, but one tensor at least.
        pickled: write ``pytorch_model.bin``, to be read with ``torch.load``, instead of
            ``model.safetensors``. Where there are several files an index is written next to them.

    Returns:
        The new files.

    Raises:
        ValueError: values are beyond the range of float16, or safetensors have no such dtype.
        CheckpointError: `out` holds weights already.
    """
    stem, suffix = ("pytorch_model", ".bin") if pickled else ("model", ".safetensors")
    index = f"{stem}{suffix}.index.json"
    found = sorted(out.glob(f"{stem}*{suffix}")) + sorted(out.glob(index))
    if found:
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
    try:
        for name, shard in zip(names, shards, strict=True):
            written.append(out / (_PARTIAL + name))
            write_file(filesystem, written[-1], shard, pickled)
        if len(shards) > 1:
            written.append(out / (_PARTIAL + index))
            filesystem.remove(written[-1])
            filesystem.write_file(written[-1], _index(names, shards))
        return _publish(filesystem, written)
    finally:
        for partial in written:
            filesystem.remove(partial)


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


def _nbytes(value: torch.Tensor | LazyTensor) -> int:
    return value.shape.numel() * value.dtype.itemsize


def _split(weights: Weights, limit: int) -> list[dict[str, torch.Tensor | LazyTensor]]:
    """Return the tensors of each file, all names of one tensor in the same."""
    names: dict[int, list[str]] = {}
    for name, value in weights.items():
        names.setdefault(id(value), []).append(name)
    shards: list[dict[str, torch.Tensor | LazyTensor]] = [{}]
    size = 0
    for own in names.values():
        added = _nbytes(weights[own[0]])
        if shards[-1] and size + added > limit:
            shards.append({})
            size = 0
        shards[-1].update(dict.fromkeys(own, weights[own[0]]))
        size += added
    return shards


def _index(names: Sequence[str], shards: Sequence[Weights]) -> bytes:
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    total = sum(_nbytes(value) for shard in shards for value in first_names(shard).values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def _write_safetensors(filesystem: Filesystem, path: Path, weights: Weights) -> None:
    for name, value in weights.items():
        if value.dtype not in SAFETENSORS_CODES:
            raise ValueError(
                f"{name}: expected a dtype that safetensors has, got {value.dtype}. Pass another file name."
            )
    listed = [TensorEntry(name, value.dtype, tuple(value.shape)) for name, value in weights.items()]
    # Readers want each tensor at its own alignment.
    entries = [listed[number] for number in by_alignment(listed)]
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
