"""From whatever the user hands over to a ZeroConfig."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from zero_ext.config.schema.config_errors import ConfigError, Problem, show
from zero_ext.config.schema.json_file import DEEPEST_NESTING, read_json_object

from .zero_config import ZeroConfig

ConfigSource = ZeroConfig | Mapping[str, object] | str | Path | None

_ONLY_IN_DEEPSPEED = frozenset({"zero_optimization", "train_micro_batch_size_per_gpu", "fp16", "bf16"})
_IS_DEEPSPEED = Problem(
    "",
    "expected native keys, got DeepSpeed's JSON. Pass it to zero_ext.initialize, or use "
    "zero_ext.config.load_deepspeed_config(...).config.",
)


def load_config(source: ConfigSource) -> ZeroConfig:
    """Read a native configuration.

    Args:
        source: a `ZeroConfig`, a mapping, the path of a JSON file, or None for the defaults.

    Returns:
        The configuration; `source` itself if it is one.

    Raises:
        ConfigError: lists every unknown key, wrong value and contradiction by key path.
        TypeError: `source` is of another type.

    Examples:
        >>> config = zero_ext.load_config({"stage": 2, "precision": {"dtype": "bf16"}})
        >>> config.stage, config.precision.dtype
        (2, 'bf16')
    """
    if source is None:
        return ZeroConfig()
    if isinstance(source, ZeroConfig):
        return source
    if isinstance(source, Mapping):
        return _native(_plain(source, 0), None)
    if isinstance(source, str | Path):
        return _native(read_json_object(source), str(source))
    raise TypeError(
        f"configuration: expected a ZeroConfig, a mapping, a path or None, got {show(source)}. Pass one of "
        "them."
    )


def _native(values: object, file: str | None) -> ZeroConfig:
    """Errors name the ``file``, and say so where the keys are DeepSpeed's."""
    try:
        return ZeroConfig.from_mapping(values)
    except ConfigError as error:
        foreign = (_IS_DEEPSPEED,) if _ONLY_IN_DEEPSPEED.intersection(error.paths) else ()
        raise ConfigError((*error.problems, *foreign), file or error.source) from None


def _plain(value: object, depth: int) -> object:
    """Return mappings of any class as dicts, as far down as a configuration can reach."""
    if isinstance(value, Mapping) and depth < DEEPEST_NESTING:
        return {key: _plain(item, depth + 1) for key, item in value.items()}
    return value
