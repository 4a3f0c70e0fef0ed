"""Configurations in every form: typed, mappings and files, of this package or DeepSpeed's."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_ext.config.base_section import accepted, key_paths
from zero_ext.config.config_errors import ConfigError, Problem, join_path, show
from zero_ext.config.deepspeed.deepspeed_keys import AUTO, LEFT_OUT, Note
from zero_ext.config.deepspeed.translate import KEYS, OPEN_SECTIONS, translate
from zero_ext.config.sources.config_file import read_config_file
from zero_ext.config.sources.environment_settings import VARIABLE, environment_settings, flattened
from zero_ext.config.sources.json_file import DEEPEST_NESTING
from zero_ext.config.zero_config import ZeroConfig

logger = logging.getLogger("zero_ext")

ConfigSource = ZeroConfig | Mapping[str, object] | str | Path | None

MOST_VALUES = 100_000
_NATIVE = frozenset(ZeroConfig.model_fields)
_DEEPSPEED = frozenset(path.partition(".")[0] for path in KEYS)
_UNRESOLVED = (
    "expected a value, got 'auto', which nothing resolves here. Write a value, or leave the key out for the "
    "default."
)


@dataclass(frozen=True)
class WrittenConfig:
    """A configuration as it was written, before "auto" has values.

    Attributes:
        name: of the source, for errors; "" for a mapping.
        values: keys and values; of a typed configuration those that are set.
        deepspeed: whether the keys are DeepSpeed's.
        overrides: what the environment sets, by native key path.
        typed: the typed configuration, if it is one.
    """

    name: str
    values: Mapping[str, object]
    deepspeed: bool = False
    overrides: Mapping[str, object] = field(default_factory=dict)
    typed: ZeroConfig | None = None

    def flat(self) -> dict[str, object]:
        """Return the values as written, by key path."""
        return dict(flattened(self.values))

    def of_deepspeed_unless_native(self) -> WrittenConfig:
        """Return it as DeepSpeed's, where that is in doubt: no key is this package's alone."""
        native = self.typed is not None or any(_is_native(key) for key in self.values)
        return self if native else dataclasses.replace(self, deepspeed=True)

    def with_dtype(self, dtype: str | None) -> WrittenConfig:
        """Return it with DeepSpeed's section of a ``dtype`` enabled, if the section does not say."""
        if not self.deepspeed or dtype is None or f"{dtype}.enabled" in self._dtype_switches():
            return self
        section = self.values.get(dtype)
        enabled = {**(section if isinstance(section, Mapping) else {}), "enabled": True}
        return dataclasses.replace(self, values={**self.values, dtype: enabled})

    def _dtype_switches(self) -> set[str]:
        return {path.replace("bfloat16.", "bf16.") for path in self.flat()}

    def resolved(self, resolve: Mapping[str, object] | None = None) -> tuple[ZeroConfig, tuple[Note, ...]]:
        """Return the configuration, with the environment's settings, and notes on DeepSpeed's keys.

        Args:
            resolve: values for keys that are "auto", by native key path or, for DeepSpeed's JSON, its own.

        Raises:
            ConfigError: lists by key path every unknown key, wrong value, contradiction and "auto".
        """
        notes: tuple[Note, ...] = ()
        config = self.typed
        resolve = {
            **(resolve or {}),
            **{path: self.overrides[path] for path in self.overrides if _exists(path)},
        }
        try:
            if self.deepspeed:
                config, notes = translate(self.values, resolve)
            if config is None:
                config = _from_native(self.values, resolve, self.overrides)
            elif self.overrides:
                config = ZeroConfig.from_mapping(
                    _merged(config.model_dump(exclude_unset=True), self.overrides)
                )
        except ConfigError as error:
            raise (error.within(self.name) if self.name else error) from None
        return (config.put_in_force() if self.overrides else config), notes


def load_config(source: ConfigSource, resolve: Mapping[str, object] | None = None) -> ZeroConfig:
    """Read a configuration.

    A mapping or file with a top-level key that is DeepSpeed's alone is DeepSpeed's JSON. It is translated,
    and its keys that have no effect are reported in the log.

    The environment variable `ZERO_EXT_CONFIG` holds settings that change what is read, such as
    `"stage=2 offload.optimizer=nvme"`, and the path of a file that is read where `source` is None, or only
    one of the two. The log says what it changes.

    Args:
        source: a `ZeroConfig`, a mapping, the path of a file (JSON, or YAML or TOML by its suffix), or None
            for the defaults. One that `load_config` returned, or a changed copy of it, is returned as it is.
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
    log_notes(notes)
    return config


def read_config(source: ConfigSource) -> WrittenConfig:
    """Return a configuration as it was written, and what the environment changes in it.

    Raises:
        ConfigError: a file or the environment variable cannot be read, or keys of both formats are mixed.
        TypeError: `source` is of another type.
    """
    typed = source if isinstance(source, ZeroConfig) else None
    if typed is not None and typed.in_force:
        return WrittenConfig("", {}, typed=typed)
    environment = environment_settings()
    if environment.file is not None and source is None:
        log_on_rank_0(f"{VARIABLE}: {environment.file} is read, as the program gives no configuration")
        source = environment.file
    elif environment.file is not None:
        log_on_rank_0(f"{VARIABLE}: {environment.file} is not read, as the program gives a configuration")
    name = str(source) if isinstance(source, str | Path) else ""
    values: Mapping[str, object]
    if typed is not None:
        values = typed.model_dump(exclude_unset=True)
    elif source is None:
        values = {}
    elif isinstance(source, Mapping):
        values = _plain(source)
    elif isinstance(source, str | Path):
        values = read_config_file(source)
    else:
        raise TypeError(
            f"configuration: expected a ZeroConfig, a mapping, a path or None, got {show(source)}. Pass one "
            "of them."
        )
    values = {key: value for key, value in values.items() if key != "$schema"}  # which editors read
    written = dict(flattened(values))
    for path, value in environment.values.items():
        if path not in written or written[path] != value:
            log_on_rank_0(f"{VARIABLE}: sets {path} = {show(value)}")
    if environment.values:
        name = f"{name or 'configuration'} with {VARIABLE}"
    return WrittenConfig(name, values, _is_deepspeed(values, name), environment.values, typed)


def log_notes(notes: Iterable[Note]) -> None:
    """Write the notes on DeepSpeed's keys to the log of the job's first process."""
    for note in notes:
        log_on_rank_0(str(note))


def log_on_rank_0(text: str) -> None:
    """Write a warning to the log of the job's first process."""
    dist: Any = sys.modules.get("torch.distributed")  # which nothing here needs
    ranks = dist is not None and dist.is_available() and dist.is_initialized()
    rank = str(dist.get_rank()) if ranks else os.environ.get("RANK", "0")
    if rank == "0":
        logger.warning("%s", text)


def _is_deepspeed(values: Mapping[str, object], name: str) -> bool:
    """Return whether there are top-level keys that are DeepSpeed's alone; ``ConfigError`` if there are keys
    of this package alone too."""
    native = sorted(filter(_is_native, values))
    foreign = sorted(key for key in values if key in _DEEPSPEED and key not in _NATIVE)
    if native and foreign:
        text = (
            f"is DeepSpeed's key, and {native[0]!r} in the same configuration is zero_ext's. Write all keys "
            "in one of the two formats (docs/how_to/transformers.md has them side by side)."
        )
        raise ConfigError([Problem(key, text) for key in foreign], name or "configuration")
    return bool(foreign)


def _is_native(key: str) -> bool:
    return key in _NATIVE and key not in _DEEPSPEED


def _exists(path: str) -> bool:
    return path in key_paths(ZeroConfig) or path.rpartition(".")[0] in OPEN_SECTIONS


def _from_native(
    values: Mapping[str, object], resolve: Mapping[str, object], overrides: Mapping[str, object]
) -> ZeroConfig:
    """Return the configuration of native values. One error lists "auto" without a value and all else."""
    problems = [
        Problem(path, "there is no such key. Correct the argument resolve.")
        for path in resolve
        if not _exists(path) and path not in KEYS
    ]
    left = _without_auto(_merged(values, overrides), "", resolve, problems)
    try:
        config = ZeroConfig.from_mapping(left)
    except ConfigError as error:
        raise ConfigError((*problems, *error.problems), error.source) from None
    if problems:
        raise ConfigError(problems)
    return config


def _without_auto(
    section: Mapping[str, object], prefix: str, resolve: Mapping[str, object], problems: list[Problem]
) -> dict[str, object]:
    """Return native values with those of ``resolve`` for "auto"; add a problem for each that it lacks."""
    found: dict[str, object] = {}
    for key, value in section.items():
        path = join_path(prefix, key)
        if isinstance(value, Mapping) and path.count(".") < DEEPEST_NESTING:
            found[key] = _without_auto(value, path, resolve, problems)
        elif not (isinstance(value, str) and value == AUTO) or _is_a_value_of(path) or "." in str(key):
            found[key] = value
        elif path not in resolve:
            problems.append(Problem(path, _UNRESOLVED))
        elif resolve[path] is not LEFT_OUT:
            found[key] = resolve[path]
    return found


def _is_a_value_of(path: str) -> bool:
    """Return whether "auto" is an ordinary value at a key path, or the path one that will be refused."""
    known = key_paths(ZeroConfig)
    if path not in known:
        return path.rpartition(".")[0] not in OPEN_SECTIONS
    words = accepted(known[path])
    return repr(AUTO) in words or "a non-empty string" in words


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


def _plain(source: Mapping[str, object]) -> dict[str, object]:
    """Return mappings of any class as dicts, as far down as a configuration can reach."""
    count = 0

    def copied(value: Any, depth: int) -> Any:
        nonlocal count
        count += 1
        if count > MOST_VALUES:
            text = (
                f"expected at most {MOST_VALUES} values, got more. Look for a mapping that contains itself."
            )
            raise ConfigError(Problem("", text))
        if isinstance(value, Mapping) and depth <= DEEPEST_NESTING:
            return {key: copied(item, depth + 1) for key, item in value.items()}
        return value

    found: dict[str, object] = copied(source, 1)
    return found
