"""Arguments of callers: DeepSpeed's JSON in its forms, and the command-line flags that name it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zero_ext.config.config_errors import show
from zero_ext.config.json_file import read_json_object
from zero_ext.integrations.deepspeed.unsupported import DeepSpeedFeatureError


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to ``parser`` and return it."""
    group = parser.add_argument_group("DeepSpeed", "configuration of the engine")
    group.add_argument("--deepspeed", action="store_true", help="use the engine; read by the script alone")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of DeepSpeed's JSON")
    return parser


def check_others(
    what: str, others: Mapping[str, Any], refused: Mapping[str, str], ignored: Iterable[str]
) -> None:
    """Look at the arguments of DeepSpeed's that ``what`` takes and does not use.

    Raises:
        TypeError: DeepSpeed has no such argument.
        DeepSpeedFeatureError: one is given that is refused, with the reason or what to do instead.
    """
    known = (*refused, *ignored)
    for name, value in others.items():
        if name not in known:
            raise TypeError(
                f"{what}: expected its own arguments or {', '.join(known)}, got {name!r}. Leave it out."
            )
        if name in refused and value is not None and value is not False:
            raise DeepSpeedFeatureError(
                f"{what}({name}=...): it is not supported: {refused[name]}. Leave it out."
            )


def json_values(what: str, source: Any) -> dict[str, Any]:
    """DeepSpeed's JSON, from a mapping, a path or an object with it, like ``DeepSpeedConfig``, as ``values``.

    Raises:
        ConfigError: a file that cannot be read or holds no JSON object.
        TypeError: something else was given; ``what`` names it.
    """
    if isinstance(source, str | Path):
        return read_json_object(source)
    found = source if isinstance(source, Mapping) else getattr(source, "values", None)
    if not isinstance(found, Mapping):
        raise TypeError(
            f"{what}: expected a mapping, a path or a DeepSpeedConfig, got {show(source)}. Pass one of them."
        )
    return dict(found)
