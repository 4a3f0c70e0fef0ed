"""Python values as JSON and back, unchanged: what schedulers, loaders and users keep besides the tensors.

Plain JSON loses tuples, non-string keys, NaN and infinities without a word. Such values are written as an
object with one key that starts with "$"; everything else stays plain JSON.
"""

from __future__ import annotations

import base64
import binascii
import collections
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from zero_ext.checkpoint.files import brief, byte_view, raw_view, shortened
from zero_ext.checkpoint.format.tensor_files import dtype_name, dtype_named

LARGEST_TENSOR_BYTES = 16 << 20
_DEEPEST = 100
_MAX_DIMENSIONS = 64
_MOST_LARGE_KEYS = 1000
_LONGEST_PATH = 500
_LONGEST_SEGMENT = 100
_TOO_MANY_LARGE_KEYS = (
    f"keys: expected at most {_MOST_LARGE_KEYS} numbers of more than 64 bits, got more. Use text as keys."
)


class _ValuePath(NamedTuple):
    """Position of a value. It becomes text only in an error: a text per item of a long list under a long
    name takes quadratic time."""

    above: _ValuePath | str
    pattern: str
    key: object

    def __str__(self) -> str:
        segments: list[str] = []
        node: _ValuePath | str = self
        while isinstance(node, _ValuePath):
            segments.append(shortened(node.pattern.format(node.key), _LONGEST_SEGMENT))
            node = node.above
        return shortened("".join([node, *reversed(segments)]), _LONGEST_PATH)


_ITEM, _ATTRIBUTE, _ENTRY, _KEY = "[{}]", ".{}", "[{!r}]", " key {!r}"
_AnyPath = _ValuePath | str


def encode(value: object, path: str) -> Any:
    """JSON for ``value``: None, bool, int, float, str, bytes, list, tuple, dict, Counter, small CPU tensors.

    TypeError naming ``path`` and the type for anything else; ValueError for a tensor over 16 MiB, or nesting
    deeper than 100 levels.
    """
    return _encode(value, path, 0)


def decode(value: Any, path: str) -> Any:
    """Return the value that ``encode`` was given; ValueError naming ``path`` for JSON it never writes."""
    return _Decoder().decode(value, path)


def _encode(value: object, path: _AnyPath, depth: int) -> Any:
    if depth > _DEEPEST:
        raise ValueError(
            f"{path}: expected at most {_DEEPEST} nested levels, got more. Flatten it, and check whether it "
            "contains itself."
        )
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        items = [_encode(item, _ValuePath(path, _ITEM, index), depth + 1) for index, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if isinstance(value, dict) and type(value) in (dict, collections.OrderedDict, collections.Counter):
        return _encode_mapping(value, path, depth)
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, path)
    raise TypeError(
        f"{path}: a {type(value).__module__}.{type(value).__qualname__} cannot be stored in a checkpoint. "
        "Pass None, bool, int, float, str, bytes, list, tuple, dict or a small tensor, such as an object's "
        "state_dict() in place of the object."
    )


def _encode_mapping(value: Mapping[Any, Any], path: _AnyPath, depth: int) -> Any:
    plain = all(type(key) is str and not key.startswith("$") for key in value)
    if plain and type(value) is not collections.Counter:
        return {
            key: _encode(item, _ValuePath(path, _ATTRIBUTE, key), depth + 1) for key, item in value.items()
        }
    if sum(map(_is_large, value)) > _MOST_LARGE_KEYS:
        raise ValueError(f"{path}: {_TOO_MANY_LARGE_KEYS}")
    pairs = [
        [
            _encode(key, _ValuePath(path, _KEY, key), depth + 1),
            _encode(item, _ValuePath(path, _ENTRY, key), depth + 1),
        ]
        for key, item in value.items()
    ]
    return {"$counter" if type(value) is collections.Counter else "$dict": pairs}


def _encode_tensor(value: torch.Tensor, path: _AnyPath) -> Any:
    if value.device.type != "cpu" or value.layout != torch.strided:
        raise TypeError(
            f"{path}: expected a dense tensor on the CPU, got a {value.layout} tensor on {value.device}. "
            "Call .cpu(), and .to_dense() if it is sparse."
        )
    if value.nbytes > LARGEST_TENSOR_BYTES:
        raise ValueError(
            f"{path}: expected a tensor of at most {LARGEST_TENSOR_BYTES} bytes alongside the parameters, "
            f"got {value.nbytes}. Make it a buffer of the model, or save it in a file of its own."
        )
    stored = byte_view(value.contiguous())
    data = base64.b64encode(raw_view(stored)).decode()
    return {"$tensor": {"dtype": dtype_name(value.dtype), "shape": list(value.shape), "data": data}}


def _is_large(value: object) -> bool:
    """Return whether `value` is a number that can share its hash with any number of others."""
    return isinstance(value, int) and value.bit_length() > 64


class _Decoder:
    """One call of `decode`."""

    def __init__(self) -> None:
        self._keys = 0  # how many the value that is decoded lies in
        self._large_keys = 0

    def decode(self, value: Any, path: _AnyPath) -> Any:
        """Return the value that was encoded."""
        if isinstance(value, list):
            return [self.decode(item, _ValuePath(path, _ITEM, index)) for index, item in enumerate(value)]
        if not isinstance(value, dict):
            self._count_large_keys(value, path)
            return value
        marks = [key for key in value if key.startswith("$")]
        if not marks:
            return {key: self.decode(item, _ValuePath(path, _ATTRIBUTE, key)) for key, item in value.items()}
        mark = marks[0]
        if len(value) != 1:
            raise ValueError(
                f"{path}: expected {brief(mark)} as the only key, got {len(value)} keys. Use another "
                "checkpoint, since this one is damaged or foreign."
            )
        try:
            return self._decode_marked(mark, value[mark], path)
        except (TypeError, KeyError, AttributeError, RuntimeError, binascii.Error) as error:
            if isinstance(error, RecursionError):
                raise
            raise ValueError(
                f"{path}: {brief(mark)} does not hold what it should: {error}. Use another checkpoint."
            ) from error

    def _decode_marked(self, mark: str, content: Any, path: _AnyPath) -> Any:
        if mark == "$float":
            if content not in ("nan", "inf", "-inf"):
                raise ValueError(
                    f"{path}: $float: expected nan, inf or -inf, got {brief(content)}. Use another "
                    "checkpoint."
                )
            return float(content)
        if mark == "$bytes":
            return base64.b64decode(content, validate=True)
        if mark == "$tuple":
            if not isinstance(content, list):
                raise ValueError(
                    f"{path}: $tuple: expected a list, got {type(content).__name__}. Use another checkpoint."
                )
            return tuple(self.decode(content, path))
        if mark in ("$dict", "$counter"):
            pairs = {}
            for key, item in content:
                self._keys += 1
                decoded = self.decode(key, path)
                self._keys -= 1
                pairs[decoded] = self.decode(item, _ValuePath(path, _ENTRY, key))
            return collections.Counter(pairs) if mark == "$counter" else pairs
        if mark == "$tensor":
            return _decode_tensor(content, path)
        raise ValueError(
            f"{path}: unknown mark {brief(mark)}. Upgrade zero_ext if a newer release wrote the checkpoint, "
            "or use another one."
        )

    def _count_large_keys(self, value: object, path: _AnyPath) -> None:
        if self._keys and _is_large(value):
            self._large_keys += 1
            if self._large_keys > _MOST_LARGE_KEYS:
                raise ValueError(f"{path}: {_TOO_MANY_LARGE_KEYS}")


def _decode_tensor(content: dict[str, Any], path: _AnyPath) -> torch.Tensor:
    dtype, shape = dtype_named(content["dtype"]), content["shape"]
    data = base64.b64decode(content["data"], validate=True)
    if len(shape) > _MAX_DIMENSIONS or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(
            f"{path}: tensor shape: expected a list of at most {_MAX_DIMENSIONS} sizes, got {brief(shape)}. "
            "Use another checkpoint."
        )
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"{path}: expected the bytes of a {dtype} tensor of shape {brief(shape)}, got {len(data)}. Use "
            "another checkpoint."
        )
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
