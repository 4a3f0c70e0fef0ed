"""The environment variable of configurations: settings, and a file where a program gives none."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from zero_ext.config.config_errors import ConfigError, Problem, show
from zero_ext.config.sources.json_file import DEEPEST_NESTING, no_duplicates

VARIABLE = "ZERO_EXT_CONFIG"
_SETTING = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class EnvironmentSettings:
    """The variable's content.

    Attributes:
        file: path of a configuration; None if there is none.
        values: settings by native key path. One of a section is as many as the section has keys.
    """

    file: str | None
    values: Mapping[str, object]


def environment_settings() -> EnvironmentSettings:
    """Read the variable: words ``key=value``, with values as in JSON, and at most one path.

    A word in quotes may have spaces.

    Raises:
        ConfigError: a word is neither, or a key occurs twice.
    """
    files: list[str] = []
    found: list[tuple[str, object]] = []
    for word in _words(os.environ.get(VARIABLE, "")):
        setting = _SETTING.fullmatch(word)
        if setting is not None:
            found += flattened({setting[1]: _value(setting[1], setting[2])})
        elif "=" in word and not word.startswith(("/", "./", "../", "~")):
            raise _refused(
                f"expected key=value, with names and dots in the key, got {show(word)}. Correct it."
            )
        else:
            files.append(word)
    values = dict(found)
    if len(values) < len(found):
        twice = next(path for path, _ in found if sum(path == other for other, _ in found) > 1)
        raise _refused(f"expected every key once, got {twice!r} twice. Keep one of them.")
    if len(files) > 1:
        raise _refused(
            f"expected key=value and at most one file, got the files {', '.join(files)}. Keep one of them."
        )
    return EnvironmentSettings(str(Path(files[0]).expanduser()) if files else None, values)


def flattened(values: Mapping[str, object], prefix: str = "", depth: int = 1) -> Iterator[tuple[str, object]]:
    """Yield values and their key paths."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and depth < DEEPEST_NESTING:
            yield from flattened(value, f"{path}.", depth + 1)
        else:
            yield path, value


def _words(text: str) -> list[str]:
    try:
        words = shlex.split(text, posix=False)  # which leaves quotes inside of words alone, for JSON
    except ValueError as error:
        raise _refused(f"expected words, got {show(text)}: {error}. Correct it.") from None
    return [word[1:-1] if word[:1] in ("'", '"') and word[-1:] == word[:1] else word for word in words]


def _value(path: str, text: str) -> object:
    """Return what JSON means by it, else the text."""
    try:
        found: object = json.loads(text, object_pairs_hook=no_duplicates)
    except (json.JSONDecodeError, RecursionError):
        return text
    except ValueError as error:
        raise _refused(f"{path}: {error} Write each key of an object once.") from None
    return found


def _refused(text: str) -> ConfigError:
    return ConfigError(Problem("", text), VARIABLE)
