"""Words for what a configuration key accepts, read off its type: used by error messages and the reference
table."""

from __future__ import annotations

import math
import types
import typing
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, MultipleOf
from pydantic.fields import FieldInfo

_MANY = 2**53


def one_of(values: tuple[object, ...]) -> str:
    """Return `'a', 'b' or 'c'`."""
    words = [repr(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def accepted(field: FieldInfo) -> str:
    """Return what a field accepts, such as "an integer from 0 to 3" or "a number above 0, or null"."""
    return _words(field.annotation, tuple(field.metadata))


def _words(annotation: Any, metadata: tuple[Any, ...]) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _words(arguments[0], metadata + tuple(annotation.__metadata__))
    if origin is Literal:
        return one_of(arguments)
    if origin in (typing.Union, types.UnionType):
        members = [_words(member, metadata) for member in arguments if member is not type(None)]
        return " or ".join(members) + (", or null" if type(None) in arguments else "")
    if origin is tuple:
        inner = typing.get_args(arguments[0])[0] if arguments else str
        return "a list of integers" if inner is int else "a list of non-empty strings"
    if origin is dict:
        return "a mapping"
    if annotation is bool:
        return "true or false"
    if annotation is str:
        return "a non-empty string"
    if annotation in (int, float):
        return ("an integer" if annotation is int else "a finite number") + _limits(metadata)
    return f"a mapping with keys {', '.join(annotation.model_fields)}"


def _limits(metadata: tuple[Any, ...]) -> str:
    low, high, above, step = -math.inf, math.inf, False, ""
    for item in _flat(metadata):
        if isinstance(item, Ge | Gt):
            bound = float(typing.cast(float, item.ge if isinstance(item, Ge) else item.gt))
            if bound >= low:
                low, above = bound, isinstance(item, Gt)
        elif isinstance(item, Le):
            high = min(high, float(typing.cast(float, item.le)))
        elif isinstance(item, MultipleOf):
            step = f", a multiple of {item.multiple_of}"
    if above:
        start = f" above {low:.10g}"
        return (start if high >= _MANY else f"{start} and at most {high:.10g}") + step
    return (f" of at least {low:.10g}" if high >= _MANY else f" from {low:.10g} to {high:.10g}") + step


def _flat(metadata: tuple[Any, ...]) -> list[Any]:
    found: list[Any] = []
    for item in metadata:
        found.extend(item.metadata if isinstance(item, FieldInfo) else [item])
    return found
