"""Fields of a foreign dict, taken out with their types checked; errors name the file and the field."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from zero_ext.checkpoint import CheckpointError

T = TypeVar("T")
_MOST_DIMENSIONS = 64
_LARGEST = 1 << 62


class Fields:
    """The dict ``values`` that is ``where`` in the file ``path``."""

    def __init__(self, values: object, path: Path, where: str = "") -> None:
        self.path = path
        self.where = where
        if not isinstance(values, Mapping):
            raise self.error("", f"is a {type(values).__name__}, a dict wanted")
        self.values: Mapping[Any, Any] = values

    def error(self, key: object, problem: str) -> CheckpointError:
        """The error about ``key``, to be raised."""
        name = ".".join(str(part) for part in (self.where, key) if part != "")
        return CheckpointError(
            f"{self.path}: {name or 'its content'} {problem}; damaged, or of a DeepSpeed that this reader "
            "does not know"
        )

    def get(self, key: object, kind: type[T]) -> T:
        """The value of ``key``, of type ``kind``."""
        if key not in self.values:
            raise self.error(key, "is missing")
        value = self.values[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(key, f"is a {type(value).__name__}, {kind.__name__} wanted")
        return value

    def optional(self, key: object, kind: type[T]) -> T | None:
        """The same, or None where there is none."""
        return None if self.values.get(key) is None else self.get(key, kind)

    def count(self, key: object) -> int:
        """A whole number from 0."""
        value = self.get(key, int)
        if not 0 <= value < _LARGEST:
            raise self.error(key, f"is {value}, a number from 0 wanted")
        return int(value)

    def inner(self, key: object) -> Fields:
        """The dict under ``key``."""
        return Fields(self.get(key, dict), self.path, ".".join(filter(None, (self.where, str(key)))))

    def strings(self, key: object) -> list[str]:
        """A list of strings."""
        found = self.get(key, list)
        if not all(type(each) is str and each for each in found):
            raise self.error(key, "is no list of names")
        return found

    def shapes(self, key: object, table: object) -> dict[str, tuple[int, ...]]:
        """``table``, found under ``key``, as names with shapes."""
        if not isinstance(table, Mapping):
            raise self.error(key, f"holds a {type(table).__name__}, names with shapes wanted")
        found = {}
        for name, shape in table.items():
            sized = isinstance(shape, tuple | list) and len(shape) <= _MOST_DIMENSIONS
            if type(name) is not str or not name or not sized:
                raise self.error(key, f"lists {name!r} as {shape!r:.80}, names with shapes wanted")
            if any(type(size) is not int or not 0 <= size < _LARGEST for size in shape):
                raise self.error(key, f"gives {name!r} the shape {tuple(shape)}, sizes from 0 wanted")
            found[name] = tuple(shape)
        return found

    def flats(self, key: object) -> list[torch.Tensor]:
        """A list of one-dimensional floating-point tensors."""
        found = self.get(key, list)
        for number, flat in enumerate(found):
            if not is_flat(flat):
                raise self.error(key, f"has as entry {number} no one-dimensional tensor of floats")
        return found


def is_flat(value: object) -> bool:
    """Whether ``value`` is a contiguous one-dimensional tensor of floats."""
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == 1
        and value.is_contiguous()
        and value.dtype.is_floating_point
    )


def one_number(value: object) -> float | None:
    """``value`` if it is a number or a tensor of one element, else None."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
