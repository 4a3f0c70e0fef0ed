"""The safetensors container: an 8-byte length, a JSON table, then the tensors' bytes without holes.

Format: https://github.com/huggingface/safetensors#format. Offsets in the table count from its end.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_ext.checkpoint.files.checkpoint_error import CheckpointError
from zero_ext.checkpoint.files.safe_open import open_regular
from zero_ext.checkpoint.format.dtypes import SAFETENSORS_CODES, SAFETENSORS_DTYPES

LARGEST_HEADER_BYTES = 100_000_000
_ALIGNMENT = 64
_REPLACE = "Replace it with an intact copy."
_MOST_DIMENSIONS = 64  # torch's; the size of a shape of millions of numbers would take hours to multiply


class TensorEntry(NamedTuple):
    """One tensor of a file: its key there, its dtype and shape."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def by_alignment(entries: Iterable[TensorEntry]) -> list[int]:
    """Return the order, as indices, in which tensors of a file lie one after another, each at its own
    alignment.
    """
    listed = list(entries)
    return sorted(range(len(listed)), key=lambda index: -listed[index].dtype.itemsize)


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
