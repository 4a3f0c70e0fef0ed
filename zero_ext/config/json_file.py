"""Reading JSON files that nobody has checked yet: size-limited, no duplicate keys, errors with line and
column."""

from __future__ import annotations

import json
from pathlib import Path

from zero_ext.config.config_errors import ConfigError, Problem

LARGEST_FILE_BYTES = 1 << 20
DEEPEST_NESTING = 32
_TOO_DEEP = f"expected at most {DEEPEST_NESTING} nested levels, got more. Flatten the value."


def read_json_object(path: str | Path) -> dict[str, object]:
    """Read one JSON object from a file.

    Raises ConfigError naming the file for: a missing or unreadable file, more than 1 MiB, bytes that are not
    UTF-8, a syntax error (with line, column and the line's text), a duplicate key, NaN or Infinity, nesting
    deeper than 32 levels, or a top level that is not an object.
    """
    path = Path(path)
    return parse_json_object(_read_text(path), str(path))


def parse_json_object(text: str, source: str) -> dict[str, object]:
    """Parse one JSON object from text; `source` names it in errors, which are those of `read_json_object`."""
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1].strip() if error.lineno <= len(text.splitlines()) else ""
        where = f"line {error.lineno}, column {error.colno}"
        problem = f"expected JSON, got {error.msg} at {where}. Correct the line: {line[:80]!r}"
        raise _refusal(problem, source) from None
    except RecursionError:
        raise _refusal(_TOO_DEEP, source) from None
    except ValueError as error:
        raise _refusal(str(error), source) from None
    if not isinstance(value, dict):
        problem = f"expected an object at the top level, got a {type(value).__name__}. Write {{...}}."
        raise _refusal(problem, source)
    if _depth(value) > DEEPEST_NESTING:
        raise _refusal(_TOO_DEEP, source)
    return value


def _refusal(problem: str, source: str) -> ConfigError:
    return ConfigError(Problem("", problem), source)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = getattr(error, "strerror", None) or error
        problem = f"the file cannot be read: {reason}. Name a file that this user may read."
        raise _refusal(problem, str(path)) from None
    if len(data) > LARGEST_FILE_BYTES:
        problem = f"expected at most {LARGEST_FILE_BYTES} bytes, got more. Name a configuration file."
        raise _refusal(problem, str(path))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"expected UTF-8, got byte {error.start} that cannot be decoded. Save it as UTF-8."
        raise _refusal(problem, str(path)) from None


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r}: it occurs twice in one object. Keep one of them.")
        found[key] = value
    return found


def _no_constant(name: str) -> object:
    raise ValueError(f"{name}: expected a finite number, which JSON requires. Write one.")


def _depth(value: object) -> int:
    deepest, level = 0, [value]
    while level:
        deepest += 1
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return deepest
