"""Reading JSON files that nobody has checked yet: size-limited, no duplicate keys, errors with line and
column."""

from __future__ import annotations

import json
from pathlib import Path

from zero_ext.config.config_errors import ConfigError, Problem

LARGEST_FILE_BYTES = 1 << 20
DEEPEST_NESTING = 32
TOO_DEEP = f"expected at most {DEEPEST_NESTING} nested levels, got more. Flatten the value."


def read_json_object(path: str | Path) -> dict[str, object]:
    """Read one JSON object from a file.

    Raises ConfigError naming the file for: a missing or unreadable file, more than 1 MiB, bytes that are not
    UTF-8, a syntax error (with line, column and the line's text), a duplicate key, NaN or Infinity, nesting
    deeper than 32 levels, or a top level that is not an object.
    """
    path = Path(path)
    return parse_json_object(read_text(path), str(path))


def parse_json_object(text: str, source: str) -> dict[str, object]:
    """Parse one JSON object from text; `source` names it in errors, which are those of `read_json_object`."""
    try:
        value = json.loads(text, object_pairs_hook=no_duplicates, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1].strip() if error.lineno <= len(text.splitlines()) else ""
        where = f"line {error.lineno}, column {error.colno}"
        problem = f"expected JSON, got {error.msg} at {where}. Correct the line: {line[:80]!r}"
        raise refusal(problem, source) from None
    except RecursionError:
        raise refusal(TOO_DEEP, source) from None
    except ValueError as error:
        raise refusal(str(error), source) from None
    return checked_object(value, source)


def checked_object(value: object, source: str) -> dict[str, object]:
    """Return the value of a file. Raises ConfigError for one that is no mapping, or that is nested deeply."""
    if not isinstance(value, dict):
        problem = f"expected an object at the top level, got a {type(value).__name__}. Write {{...}}."
        raise refusal(problem, source)
    if _depth(value) > DEEPEST_NESTING:
        raise refusal(TOO_DEEP, source)
    return value


def refusal(problem: str, source: str) -> ConfigError:
    """Return the error for a file that cannot be read."""
    return ConfigError(Problem("", problem), source)


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ConfigError for one that is unreadable, too large, or not UTF-8."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = getattr(error, "strerror", None) or error
        problem = f"the file cannot be read: {reason}. Name a file that this user may read."
        raise refusal(problem, str(path)) from None
    if len(data) > LARGEST_FILE_BYTES:
        problem = f"expected at most {LARGEST_FILE_BYTES} bytes, got more. Name a configuration file."
        raise refusal(problem, str(path))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"expected UTF-8, got byte {error.start} that cannot be decoded. Save it as UTF-8."
        raise refusal(problem, str(path)) from None


def no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the pairs of a JSON object as a dict. Raises ``ValueError`` for a key that occurs twice."""
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
    while level and deepest <= DEEPEST_NESTING:
        deepest += 1
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return deepest
