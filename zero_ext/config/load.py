"""From whatever the user hands over to a ZeroConfig."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .errors import ConfigError, show
from .json_file import DEEPEST_NESTING, read_json_object
from .root import ZeroConfig

ConfigSource = ZeroConfig | Mapping[str, object] | str | Path | None


def load_config(source: ConfigSource) -> ZeroConfig:
    """Read a native configuration: a ZeroConfig, a mapping, the path of a JSON file, or None for the
    defaults.

    Raises ConfigError (a ValueError) that lists every unknown key, wrong value and contradiction by key
    path, and TypeError for a source of another type.
    """
    if source is None:
        return ZeroConfig()
    if isinstance(source, ZeroConfig):
        return source
    if isinstance(source, Mapping):
        return ZeroConfig.from_mapping(_plain(source, 0))
    if isinstance(source, str | Path):
        values = read_json_object(source)
        try:
            return ZeroConfig.from_mapping(values)
        except ConfigError as error:
            raise error.within(str(source)) from None
    raise TypeError(f"configuration is {show(source)}, wanted a ZeroConfig, a mapping, a path or None")


def _plain(value: object, depth: int) -> object:
    """Mappings of any class as dicts, as far down as a configuration can reach."""
    if isinstance(value, Mapping) and depth < DEEPEST_NESTING:
        return {key: _plain(item, depth + 1) for key, item in value.items()}
    return value
