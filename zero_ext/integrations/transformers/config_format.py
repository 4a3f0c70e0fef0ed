"""The format of a configuration: zero_ext's keys, or DeepSpeed's JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zero_ext.config import ConfigError, ZeroConfig
from zero_ext.config.config_errors import Problem
from zero_ext.config.deepspeed.key_registry import KEYS

AUTO = "auto"
_NATIVE = frozenset(ZeroConfig.model_fields)
_DEEPSPEED = frozenset(path.partition(".")[0] for path in KEYS)
_SOURCE = "zero_config"


def is_deepspeed(values: Mapping[str, Any]) -> bool:
    """Return whether this is DeepSpeed's JSON: it has top-level keys that are DeepSpeed's alone, or says
    "auto" and has none that is zero_ext's alone.

    Raises ConfigError for keys of both formats, and for "auto" where only zero_ext's are.
    """
    native = sorted(key for key in values if key in _NATIVE and key not in _DEEPSPEED)
    foreign = sorted(key for key in values if key in _DEEPSPEED and key not in _NATIVE)
    if native and foreign:
        text = (
            f"is DeepSpeed's key, and {native[0]!r} in the same configuration is zero_ext's. Write all "
            "keys in "
            "one of the two formats (docs/how_to/transformers.md has them side by side)."
        )
        raise ConfigError([Problem(key, text) for key in foreign], _SOURCE)
    automatic = [path for path, value in flat(values) if value == AUTO]
    if native and automatic:
        text = (
            "expected a value, got 'auto', which only DeepSpeed's JSON may have. Leave the key out to take "
            "TrainingArguments' value or the default."
        )
        raise ConfigError([Problem(path, text) for path in automatic], _SOURCE)
    return bool(foreign or automatic)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by key path."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
