"""The safetensors container: an 8-byte length, a JSON table, then the tensors' bytes without holes.

Format: https://github.com/huggingface/safetensors#format. Offsets in the table count from its end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from zero_ext.checkpoint.dtypes import SAFETENSORS_CODES

LARGEST_HEADER_BYTES = 100_000_000
_ALIGNMENT = 64


class TensorEntry(NamedTuple):
    """One tensor of a file: its key there, its dtype and shape."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def by_alignment(entries: Iterable[TensorEntry]) -> list[int]:
    """The order, as indices, in which tensors of a file lie one after another, each at its own alignment."""
    listed = list(entries)
    return sorted(range(len(listed)), key=lambda index: -listed[index].dtype.itemsize)


def encode_header(entries: Iterable[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the first tensor; their length is a multiple of 64.

    ValueError if a key occurs twice, or if the table passes the 100 MB that readers accept.
    """
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for entry in entries:
        if entry.key in table:
            raise ValueError(f"tensor {entry.key!r} occurs twice in one file")
        end = offset + entry.nbytes
        code = SAFETENSORS_CODES[entry.dtype]
        table[entry.key] = {"dtype": code, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    padded = -(-(8 + len(text)) // _ALIGNMENT) * _ALIGNMENT - 8
    if padded > LARGEST_HEADER_BYTES:
        raise ValueError(
            f"{len(table)} tensors need a table of {padded} bytes; "
            f"readers of safetensors accept {LARGEST_HEADER_BYTES}"
        )
    return padded.to_bytes(8, "little") + text.ljust(padded)
