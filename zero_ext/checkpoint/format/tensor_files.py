"""Tensors in files: dtypes, memory order, the safetensors container, and the files of one model."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_ext.checkpoint.files import CheckpointError, open_regular, read_limited

SAFETENSORS_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
SAFETENSORS_DTYPES = {code: dtype for dtype, code in SAFETENSORS_CODES.items()}
LARGEST_HEADER_BYTES = 100_000_000
_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in SAFETENSORS_CODES}
_ALIGNMENT = 64
_MOST_DIMENSIONS = 64  # torch's; the size of a shape of millions of numbers would take hours to multiply
WEIGHT_NAMES = ("model.safetensors", "model.safetensors.index.json")
_REPLACE = "Replace it with an intact copy."


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name without the module: ``float32``. ValueError for a dtype no checkpoint holds."""
    if dtype not in SAFETENSORS_CODES:
        raise ValueError(
            f"dtype: expected one that a checkpoint can store ({', '.join(_BY_NAME)}), got {dtype}. Convert "
            "to one of these."
        )
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of a name; ValueError for a name no checkpoint holds."""
    if name not in _BY_NAME:
        raise ValueError(f"dtype: expected one of {', '.join(_BY_NAME)}, got {name!r}. Use one of these.")
    return _BY_NAME[name]


def converts(stored: torch.dtype, needed: torch.dtype) -> bool:
    """Return whether stored values can become those that are needed: floats convert, nothing else does."""
    return stored == needed or (stored.is_floating_point and needed.is_floating_point)


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Dimensions from the outermost to the innermost in memory; those of one element are left out.

    ValueError unless the elements fill ``prod(shape)`` places without holes or overlaps.
    """
    if len(shape) != len(stride):
        raise ValueError(
            f"stride: expected {len(shape)} numbers, one for each of shape {tuple(shape)}, got "
            f"{tuple(stride)}. Pass one for each dimension."
        )
    if math.prod(shape) == 0:
        return ()
    order = sorted((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: -stride[dim])
    expected = 1
    for dim in reversed(order):
        if stride[dim] != expected:
            raise ValueError(
                f"stride: expected a dense layout of shape {tuple(shape)}, as only these can be stored, got "
                f"{tuple(stride)}, which leaves holes or overlaps in memory. Make the tensor contiguous."
            )
        expected *= shape[dim]
    return tuple(order)


def is_logical_order(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether memory order is row-major order already."""
    order = memory_order(shape, stride)
    return list(order) == sorted(order)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return torch.empty(tuple(shape), device="meta").stride()


def to_logical_order(flat: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Return a row-major tensor of ``shape`` from its elements in memory order (``flat``, 1-D)."""
    return torch.as_strided(flat, tuple(shape), tuple(stride)).contiguous()


class TensorEntry(NamedTuple):
    """One tensor of a file: its key there, its dtype and shape."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def encode_header(entries: Iterable[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes before the first tensor; their length is a multiple of 64.

    ValueError if a key occurs twice, or if the table passes the 100 MB that readers accept.
    """
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for entry in entries:
        if entry.key in table:
            raise ValueError(f"tensor {entry.key!r}: it occurs twice in one file. Rename one of the two.")
        end = offset + entry.nbytes
        code = SAFETENSORS_CODES[entry.dtype]
        table[entry.key] = {"dtype": code, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    padded = -(-(8 + len(text)) // _ALIGNMENT) * _ALIGNMENT - 8
    if padded > LARGEST_HEADER_BYTES:
        raise ValueError(
            f"table of {len(table)} tensors: expected at most {LARGEST_HEADER_BYTES} bytes, which readers of "
            f"safetensors accept, got {padded}. Write fewer tensors to one file."
        )
    return padded.to_bytes(8, "little") + text.ljust(padded)


class StoredTensor(NamedTuple):
    """A tensor of a file, row-major, from byte ``offset`` of the file on."""

    entry: TensorEntry
    offset: int


def read_header(path: Path) -> list[StoredTensor]:
    """Return the tensors of a file that somebody else wrote, in the order of their bytes.

    CheckpointError, naming the file and what is wrong, unless the table is one that the format allows and its
    tensors fill the rest of the file without holes or overlaps; OSError if it cannot be read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(LARGEST_HEADER_BYTES, size - 8):
            raise CheckpointError(
                f"{path}: it is not a safetensors file: expected a table of 2 to {LARGEST_HEADER_BYTES} "
                f"bytes within the file, got a table of {length} bytes in a file of {size}. {_REPLACE}"
            )
        text = file.read(length)
    try:
        table = json.loads(text, object_pairs_hook=partial(_without_repetition, path))
        if not isinstance(table, dict):
            raise _damaged(path, f"expected a table of names, got {type(table).__name__}")
        table.pop("__metadata__", None)
        found = [_stored_tensor(path, key, value, 8 + length) for key, value in table.items()]
        found.sort(key=lambda tensor: (tensor.offset, tensor.entry.nbytes))
        _check_gapless(path, found, 8 + length, size)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    return found


def _damaged(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path}: its table of tensors is damaged: {problem}. {_REPLACE}")


def _without_repetition(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise _damaged(path, "a name occurs twice")
    return table


def _stored_tensor(path: Path, key: str, value: Any, begin: int) -> StoredTensor:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"{key!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_DTYPES:
        raise _damaged(
            path, f"dtype of {key!r}: expected one of {', '.join(SAFETENSORS_DTYPES)}, got {dtype!r}"
        )
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if isinstance(numbers, list) and len(numbers) > _MOST_DIMENSIONS:
            raise _damaged(
                path, f"{what} of {key!r}: expected at most {_MOST_DIMENSIONS} numbers, got {len(numbers)}"
            )
        if not isinstance(numbers, list) or any(type(one) is not int or one < 0 for one in numbers):
            raise _damaged(path, f"{what} of {key!r}: expected a list of numbers from 0, got {numbers!r}")
    entry = TensorEntry(key, SAFETENSORS_DTYPES[dtype], tuple(shape))
    if len(offsets) != 2 or offsets[1] - offsets[0] != entry.nbytes:
        raise _damaged(
            path,
            f"data_offsets of {key!r}: expected {entry.nbytes} bytes, as {dtype} of shape {shape} has, got "
            f"{offsets}",
        )
    return StoredTensor(entry, begin + offsets[0])


def _check_gapless(path: Path, tensors: Iterable[StoredTensor], begin: int, end: int) -> None:
    for tensor in tensors:
        if tensor.offset != begin:
            raise _damaged(
                path, f"{tensor.entry.key!r}: expected its first byte at {begin}, got {tensor.offset}"
            )
        begin += tensor.entry.nbytes
    if begin != end:
        raise _damaged(
            path, f"expected the end of the tensors at byte {end}, the end of the file, got {begin}"
        )


@dataclass(frozen=True)
class WeightFiles:
    """Checked files, and the file number and offset of each tensor."""

    paths: tuple[Path, ...]
    tensors: Mapping[str, tuple[int, StoredTensor]]

    def digest(self) -> str:
        """Return a hash of all tables, by which ranks check that they read the same files."""
        text = repr([[path.name for path in self.paths], sorted(self.tensors.items())])
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def find_weights(path: str | os.PathLike[str]) -> WeightFiles:
    """Return the tensors of ``path``: a .safetensors file, an index, or a folder with ``model.safetensors``
    or ``model.safetensors.index.json``.

    CheckpointError, naming the file, for one that is missing, damaged or hostile; nothing is unpickled, and
    nothing outside the index's own folder is opened.
    """
    root = Path(path).absolute()
    if root.is_dir():
        names = [name for name in WEIGHT_NAMES if (root / name).exists()]
        if not names:
            seen = sorted(entry.name for entry in root.iterdir())[:8]
            raise CheckpointError(
                f"{root}: expected {' or '.join(WEIGHT_NAMES)} in it, got {seen}. Convert other formats "
                "with transformers: model.save_pretrained(folder)."
            )
        root = root / names[0]
    try:
        if root.suffix != ".json":
            return _collect({root: None})
        wanted: dict[Path, set[str] | None] = {}
        for key, name in _read_index(root).items():
            keys = wanted.setdefault(root.parent / name, set())
            if keys is not None:
                keys.add(key)
        return _collect(wanted)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or root}: it cannot be read: {error.strerror}. Check the path and its "
            "permissions."
        ) from error
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{root}: it names a file that no file system can hold: {error}. Repair the index."
        ) from error


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(read_limited(path, LARGEST_HEADER_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: it is not an index of safetensors files: {error}. Pass such an index, or a "
            ".safetensors file."
        ) from error
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names:
        raise CheckpointError(
            f"{path}: it is not an index of safetensors files, since it has no 'weight_map'. Pass such an "
            "index, or a .safetensors file."
        )
    for key, name in names.items():
        plain = isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")
        if not plain or "\0" in name:
            raise CheckpointError(
                f"{path}: file of {key!r}: expected a .safetensors file of the same folder, got {name!r}. "
                "Repair the index."
            )
    return names


def _collect(wanted: Mapping[Path, set[str] | None]) -> WeightFiles:
    """Return the tensors of all files; those of ``wanted``, where listed, must be in their file."""
    tensors: dict[str, tuple[int, StoredTensor]] = {}
    for number, (path, keys) in enumerate(wanted.items()):
        found = {tensor.entry.key: (number, tensor) for tensor in read_header(path)}
        absent = sorted((keys or set()) - found.keys())
        if absent:
            raise CheckpointError(
                f"{path}: {absent[0]!r} is not in it, though the index says so. Repair the index, or replace "
                "this file with an intact copy."
            )
        repeated = sorted(found.keys() & tensors.keys())
        if repeated:
            raise CheckpointError(
                f"{path}: {repeated[0]!r} is in another file of the same weights too. Remove it from one of "
                "them."
            )
        tensors |= found
    return WeightFiles(tuple(wanted), tensors)
