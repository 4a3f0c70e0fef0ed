"""Configurations from wherever they come: typed, mappings and files, of this package or DeepSpeed's, and what
the environment says about them."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_ext.config.base_section import accepted, key_paths
from zero_ext.config.config_errors import ConfigError, Problem, join_path, show
from zero_ext.config.deepspeed.deepspeed_keys import AUTO, LEFT_OUT, Note
from zero_ext.config.deepspeed.translate import KEYS, OPEN_SECTIONS, SECTIONS, translate
from zero_ext.config.sources.config_file import read_config_file
from zero_ext.config.sources.json_file import DEEPEST_NESTING
from zero_ext.config.zero_config import ZeroConfig

logger = logging.getLogger("zero_ext")

ConfigSource = ZeroConfig | Mapping[str, object] | str | Path | None

VARIABLE = "ZERO_EXT_CONFIG"
_SCHEMA = "$schema"  # names the JSON Schema for editors
_NATIVE = frozenset(ZeroConfig.model_fields)
_DEEPSPEED = frozenset(path.partition(".")[0] for path in KEYS)
_UNRESOLVED = (
    "expected a value, got 'auto', which nothing resolves here. Write a value, or leave the key out for the "
    "default."
)
_SETTING = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class WrittenConfig:
    """A configuration as it was written, with the environment's changes, but without values for "auto".

    Attributes:
        name: of the source, for errors.
        values: keys and values; None for a typed configuration.
        typed: the typed configuration; None for any other.
        deepspeed: whether the keys are DeepSpeed's.
        overrides: native keys of DeepSpeed's JSON, which the environment sets in what the JSON means.
    """

    name: str
    values: Mapping[str, object] | None
    typed: ZeroConfig | None
    deepspeed: bool
    overrides: Mapping[str, object]

    def flat(self) -> dict[str, object]:
        """Return the values as written, by key path."""
        return dict(_flat(self.values or {}, "", 1))

    def resolved(self, resolve: Mapping[str, object] | None = None) -> tuple[ZeroConfig, tuple[Note, ...]]:
        """Return the configuration, and notes on keys of DeepSpeed's JSON that have no effect.

        Args:
            resolve: values for keys that are "auto", by native key path or DeepSpeed's. Others are ignored.

        Raises:
            ConfigError: lists by key path every unknown key, wrong value, contradiction and "auto".
        """
        if self.typed is not None:
            return self.typed, ()
        resolve = resolve or {}
        try:
            if not self.deepspeed:
                return ZeroConfig.from_mapping(_without_auto(self.values or {}, resolve)), ()
            config, notes = translate(self.values or {}, resolve)
            if self.overrides:
                said = config.model_dump(exclude_unset=True)
                config = ZeroConfig.from_mapping(_merged(said, self.overrides))
            return config, notes
        except ConfigError as error:
            raise (error.within(self.name) if self.name else error) from None


def load_config(source: ConfigSource, resolve: Mapping[str, object] | None = None) -> ZeroConfig:
    """Read a configuration.

    Every function that has a configuration as its argument reads it like this.

    What has a top-level key that is DeepSpeed's alone is DeepSpeed's JSON, and it is translated. Keys that
    have no effect are then reported in the log.

    The environment variable `ZERO_EXT_CONFIG` holds settings that change what is read, such as
    `"stage=2 offload.optimizer=nvme"`, and the path of a file that is read where `source` is None, or only
    one of the two. The log says what it changes.

    Args:
        source: a `ZeroConfig`, a mapping, the path of a file (JSON, or YAML or TOML by its suffix), or None
            for the defaults.
        resolve: values for keys that are "auto", by key path.

    Returns:
        The configuration.

    Raises:
        ConfigError: lists every unknown key, wrong value, contradiction and unresolved "auto" by key path.
        TypeError: `source` is of another type.

    Examples:
        >>> config = zero_ext.load_config({"stage": 2, "precision": {"dtype": "bf16"}})
        >>> config.stage, config.precision.dtype
        (2, 'bf16')
        >>> zero_ext.load_config({"zero_optimization": {"stage": 1}, "train_batch_size": 8}).stage
        1
    """
    config, notes = read_config(source).resolved(resolve)
    for note in notes:
        log_on_rank_0(str(note))
    return config


def read_config(source: ConfigSource) -> WrittenConfig:
    """Return a configuration as it was written, with the environment's changes, of typed ones too.

    Raises:
        ConfigError: a file or the environment variable cannot be read, or keys of both formats are mixed.
        TypeError: `source` is of another type.
    """
    file, settings = _environment()
    if file is not None and source is None:
        log_on_rank_0(f"{VARIABLE}: {file} is read, as the program gives no configuration")
        source = file
    elif file is not None and not isinstance(source, ZeroConfig):
        log_on_rank_0(f"{VARIABLE}: {file} is not read, as the program gives a configuration")
    if isinstance(source, ZeroConfig):
        settings = {path: value for path, value in settings.items() if _at(source, path) != value}
        if not settings:
            return WrittenConfig("", None, source, False, {})
    for path, value in settings.items():
        log_on_rank_0(f"{VARIABLE}: sets {path} = {show(value)}")
    name = str(source) if isinstance(source, str | Path) else ""
    if settings:
        name = f"{name or 'configuration'} with {VARIABLE}"
    values: dict[str, object]
    if isinstance(source, ZeroConfig):
        values = source.model_dump(exclude_unset=True)
    elif source is None:
        values = {}
    elif isinstance(source, Mapping):
        values = {key: _plain(value, 1) for key, value in source.items()}
    elif isinstance(source, str | Path):
        values = read_config_file(source)
    else:
        raise TypeError(
            f"configuration: expected a ZeroConfig, a mapping, a path or None, got {show(source)}. Pass one "
            "of them."
        )
    values.pop(_SCHEMA, None)
    deepspeed = _is_deepspeed(values, name or "configuration")
    own = {path: value for path, value in settings.items() if deepspeed and not _is_deepspeeds(path)}
    written = _merged(values, {path: value for path, value in settings.items() if path not in own})
    _is_deepspeed(written, name)  # which a setting may contradict
    return WrittenConfig(name, written, None, deepspeed, own)


def _environment() -> tuple[str | None, dict[str, object]]:
    """Return the file and the settings of the environment variable."""
    text = os.environ.get(VARIABLE, "")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            Problem("", f"expected words, got {show(text)}: {error}. Correct it."), VARIABLE
        ) from None
    matches = [(word, _SETTING.fullmatch(word)) for word in words]
    files = [word for word, match in matches if match is None]
    wrong = [word for word in files if "=" in word]
    if wrong:
        text = f"expected key=value, with names and dots in the key, got {show(wrong[0])}. Correct it."
        raise ConfigError(Problem("", text), VARIABLE)
    if len(files) > 1:
        text = f"expected key=value and at most one file, got the files {', '.join(files)}. Keep one of them."
        raise ConfigError(Problem("", text), VARIABLE)
    settings = {match[1]: _value(match[2]) for _, match in matches if match is not None}
    return (files[0] if files else None), settings


def _value(text: str) -> object:
    """Return what JSON means by it, else the text."""
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found


def log_on_rank_0(text: str) -> None:
    """Write a warning to the log of the job's first process."""
    dist: Any = sys.modules.get("torch.distributed")  # which nothing here needs
    ranks = dist is not None and dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if ranks else int(os.environ.get("RANK") or 0)
    if rank == 0:
        logger.warning("%s", text)


def _is_deepspeed(values: Mapping[str, object], name: str) -> bool:
    """Return whether there are top-level keys that are DeepSpeed's alone; ``ConfigError`` if there are keys
    of this package alone too."""
    native = sorted(key for key in values if key in _NATIVE and key not in _DEEPSPEED)
    foreign = sorted(key for key in values if key in _DEEPSPEED and key not in _NATIVE)
    if native and foreign:
        text = (
            f"is DeepSpeed's key, and {native[0]!r} in the same configuration is zero_ext's. Write all keys "
            "in one of the two formats (docs/how_to/transformers.md has them side by side)."
        )
        raise ConfigError([Problem(key, text) for key in foreign], name)
    return bool(foreign)


def _is_deepspeeds(path: str) -> bool:
    return path in KEYS or path in SECTIONS or path.rpartition(".")[0] in OPEN_SECTIONS


def _without_auto(values: Mapping[str, object], resolve: Mapping[str, object]) -> dict[str, object]:
    """Return native values with those of ``resolve`` for "auto"."""
    known, problems = key_paths(ZeroConfig), []

    def walk(section: Mapping[str, object], prefix: str, depth: int) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in section.items():
            path = join_path(prefix, key)
            if isinstance(value, Mapping) and depth < DEEPEST_NESTING:
                found[key] = walk(value, path, depth + 1)
            elif value != AUTO:
                found[key] = value
            elif path in resolve:
                if resolve[path] is not LEFT_OUT:
                    found[key] = resolve[path]
            elif path in known and repr(AUTO) not in accepted(known[path]):
                problems.append(Problem(path, _UNRESOLVED))
            else:
                found[key] = value
        return found

    values = walk(values, "", 1)
    if problems:
        raise ConfigError(problems)
    return values


def _merged(values: Mapping[str, object], settings: Mapping[str, object]) -> dict[str, object]:
    """Return the values with others at some key paths."""
    found = dict(values)
    for path, value in settings.items():
        parent, _, rest = path.partition(".")
        if rest:
            inner = found.get(parent)
            value = _merged(inner if isinstance(inner, Mapping) else {}, {rest: value})
        found[parent] = value
    return found


def _at(config: ZeroConfig, path: str) -> object:
    """Return the value at a key path; None where the path leads nowhere."""
    found: object = config
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)
    return list(found) if isinstance(found, tuple) else found


def _flat(values: Mapping[str, object], prefix: str, depth: int) -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        path = join_path(prefix, key)
        if isinstance(value, Mapping) and depth < DEEPEST_NESTING:
            yield from _flat(value, path, depth + 1)
        else:
            yield path, value


def _plain(value: object, depth: int) -> object:
    """Return mappings of any class as dicts, as far down as a configuration can reach."""
    if isinstance(value, Mapping) and depth < DEEPEST_NESTING:
        return {key: _plain(item, depth + 1) for key, item in value.items()}
    return value
