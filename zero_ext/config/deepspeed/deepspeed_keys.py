"""The values that one key of DeepSpeed's JSON accepts and their translation, and what is known of a JSON."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from zero_ext.config.base_section import LARGEST_COUNT, is_number, one_of
from zero_ext.config.config_errors import Problem

Fate = Literal["supported", "no effect", "unsupported"]

AUTO = "auto"


class LeftOut(enum.Enum):
    """The type of ``LEFT_OUT``."""

    LEFT_OUT = "left out"


# The value of an "auto" that counts as not written, because whoever reads the configuration sets the key.
LEFT_OUT: Final = LeftOut.LEFT_OUT


@dataclass(frozen=True)
class ValueType:
    """A type of JSON value: its description, and a check."""

    words: str
    fits: Callable[[Any], bool]


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
        harmless: values that request nothing, or what happens here in any case. They are accepted without a
            note.
        auto: whether an unresolved "auto" means the default, as in DeepSpeed. Otherwise it is an error.
        switch: path of the key that enables its section. While that key is off, this key is checked and
            ignored.
        stages: ZeRO stages that the key applies to. In other stages it is reported as having no effect.
        words: native values by DeepSpeed's values in lower case, if they differ.
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


def supported(path: str, value_type: ValueType, why: str, native: str = "", **more: Any) -> Key:
    """Return a key that does what it does in DeepSpeed."""
    return Key(path, value_type, "supported", why, native, **more)


def no_effect(path: str, value_type: ValueType, why: str, *harmless: object, **more: Any) -> Key:
    """Return a key that is noted unless its value is among `harmless`."""
    return Key(path, value_type, "no effect", why, harmless=harmless, **more)


def unsupported(path: str, value_type: ValueType, why: str, *harmless: object, **more: Any) -> Key:
    """Return a key that is refused unless its value is among `harmless`."""
    return Key(path, value_type, "unsupported", why, harmless=harmless, **more)


def section(prefix: str, *keys: Key, switch: str = "", auto: bool = False, also: str = "") -> tuple[Key, ...]:
    """Return the keys of a section, given with paths relative to `prefix`.

    `switch` is the key that enables all others, for which an unresolved "auto" means the default if `auto`.
    `also` is another name of the section.
    """
    return tuple(
        replace(
            key,
            path=f"{prefix}.{key.path}",
            switch=f"{prefix}.{key.switch or switch}" if (key.switch or switch) not in ("", key.path) else "",
            auto=key.auto or (auto and key.path != switch),
            aliases=tuple(f"{prefix}.{alias}" for alias in key.aliases)
            + ((f"{also}.{key.path}",) if also else ()),
        )
        for key in keys
    )


@dataclass(frozen=True)
class Note:
    """A note that is reported once about a translated configuration.

    Attributes:
        path: DeepSpeed's key path.
        outcome: "no effect" for a key that changes nothing here, "default" for a default that DeepSpeed
            would take, "difference" for a key that acts in another place.
        why: the reason.
    """

    path: str
    outcome: str
    why: str

    def __str__(self) -> str:
        return f"{self.path}: {self.outcome}: {self.why}"


@dataclass
class ResolvedKeys:
    """Values by the key's own path (aliases and "auto" resolved), the paths as written, what was wrong,
    notes, and the values that the caller has for "auto"."""

    values: dict[str, Any] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    resolve: Mapping[str, object] = field(default_factory=dict)

    def add_problem(self, path: str, text: str) -> None:
        """Add a problem."""
        self.problems.append(Problem(path, text))

    def note(self, path: str, why: str, outcome: str = "no effect") -> None:
        """Add a note."""
        self.notes.append(Note(path, outcome, why))

    def drop(self, section: str) -> bool:
        """Remove the values of a section; return whether there were any."""
        found = [path for path in self.values if path.startswith(f"{section}.")]
        for path in found:
            del self.values[path]
        return bool(found)

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        found: int = self.values.get("zero_optimization.stage", 0)
        return found
