"""The values that one key of DeepSpeed's JSON accepts, and their translation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from zero_ext.config.base_section import LARGEST_COUNT, is_number, one_of

Fate = Literal["supported", "no effect", "unsupported"]


@dataclass(frozen=True)
class ValueType:
    """A type of JSON value: its description, and a check."""

    words: str
    fits: Callable[[object], bool]


FLAG = ValueType("true or false", lambda value: isinstance(value, bool))
TEXT = ValueType("a string", lambda value: isinstance(value, str))
TEXTS = ValueType(
    "a string or a list of strings",
    lambda value: (
        isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value))
    ),
)
MAPPING = ValueType("a mapping", lambda value: isinstance(value, dict))
ANYTHING = ValueType("anything", lambda value: True)


def integer(low: int, high: int = LARGEST_COUNT) -> ValueType:
    """Integers from `low` to `high`; 5e8 counts as one."""
    words = f"an integer of at least {low}" if high == LARGEST_COUNT else f"an integer from {low} to {high}"
    return ValueType(words, lambda v: is_number(v) and v == int(v) and low <= v <= high)


def number(low: float, high: float = math.inf) -> ValueType:
    """Finite numbers from `low` to `high`."""
    words = (
        f"a finite number of at least {low:g}" if high == math.inf else f"a number from {low:g} to {high:g}"
    )
    return ValueType(words, lambda v: is_number(v) and low <= v <= high)


def choice(*values: str) -> ValueType:
    """Return one of `values`, in any case."""
    return ValueType(one_of(values), lambda value: isinstance(value, str) and value.lower() in values)


def or_null(value_type: ValueType) -> ValueType:
    """Return `value_type` or null as one type."""
    return ValueType(f"{value_type.words}, or null", lambda value: value is None or value_type.fits(value))


@dataclass(frozen=True)
class Key:
    """One key of DeepSpeed's JSON.

    Attributes:
        path: its full path. `aliases` are other full paths with the same meaning.
        value_type: accepted values.
        fate: outcome of the key.
        why: the meaning of a "supported" key, the reason for "no effect", the reason and the fix for
            "unsupported".
        native: path of the native key with the same value, for keys that map one to one.
        words: native values by DeepSpeed's values in lower case, if they differ.
        harmless: values that request nothing, or what happens here in any case. They are accepted without a
            note.
        auto: whether an unresolved "auto" means the default, as in DeepSpeed. Otherwise it is an error.
        switch: path of the key that enables its section. While that key is off, this key is checked and
            ignored.
        stages: ZeRO stages that the key applies to. In other stages it is reported as having no effect.
    """

    path: str
    value_type: ValueType
    fate: Fate
    why: str
    native: str = ""
    harmless: tuple[object, ...] = ()
    auto: bool = False
    switch: str = ""
    stages: tuple[int, ...] = (0, 1, 2, 3)
    aliases: tuple[str, ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)

    def native_value(self, value: object) -> object:
        """Return `value` for the native key, with words in lower case or replaced."""
        if isinstance(value, bool):
            return self.words.get(str(value).lower(), value)
        if not isinstance(value, str):
            return value
        return self.words.get(value.lower(), value.lower())

    def asks_for_something(self, value: object) -> bool:
        """Return whether `value` differs from every harmless one (True is not 1 here, NONE is none)."""
        value = value.lower() if isinstance(value, str) else value
        return not any(type(value) is type(calm) and value == calm for calm in self.harmless)
