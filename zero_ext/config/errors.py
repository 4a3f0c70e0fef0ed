"""Configuration errors: every problem of a configuration at once, each named by its key path."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_LONGEST_VALUE_SHOWN = 80


def show(value: object) -> str:
    """Short text of a value seen and its type, as error messages quote it."""
    try:
        text = repr(value)
    except ValueError:  # python refuses to print integers of thousands of digits
        text = "a value too large to print"
    if len(text) > _LONGEST_VALUE_SHOWN:
        text = text[: _LONGEST_VALUE_SHOWN - 3] + "..."
    return f"{text} ({type(value).__name__})"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name` in spelling, else one that contains it or lies in it, else None."""
    names = list(known)
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if found:
        return found[0]
    related = [other for other in names if len(name) >= 4 and (name in other or other in name)]
    return min(related, key=len) if related else None


def join_path(*parts: object) -> str:
    """Join key path parts with dots; an empty first part means the top level, an empty key shows as ''."""
    inner = parts[1:] if parts and parts[0] == "" else parts
    return ".".join(str(part) or "''" for part in inner)


@dataclass(frozen=True)
class Problem:
    """One mistake: the key path it sits at and what is wrong, wanted and to be done."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" if self.path else self.text


class ConfigError(ValueError):
    """A configuration that cannot be used. `problems` holds every mistake found, `paths` their key paths."""

    def __init__(self, problems: Problem | Sequence[Problem], source: str = "configuration") -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.source = source
        lines = [str(problem) for problem in self.problems]
        text = lines[0] if len(lines) == 1 else "".join(f"\n  - {line}" for line in lines)
        super().__init__(f"{source}: {text}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...], str]]:
        return ConfigError, (self.problems, self.source)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(problem.path for problem in self.problems)

    def within(self, source: str) -> ConfigError:
        """The same problems, said of another source (a file's path)."""
        return ConfigError(self.problems, source)


def unknown_key(path: str, known: Iterable[str]) -> Problem:
    """The problem of a key nobody knows, with the nearest known key of the same level.

    `known` are the full paths of the keys that exist beside it (or anywhere, where the level has none close).
    """
    candidates = list(known)
    parent, _, name = path.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in candidates if key.rpartition(".")[0] == parent}
    close = nearest(name, siblings)
    suggestion = siblings[close] if close else None
    if suggestion is None:
        by_name = {key.rpartition(".")[2]: key for key in candidates}
        close = nearest(name, by_name)
        suggestion = by_name[close] if close else None
    if suggestion is not None:
        return Problem(path, f"unknown key; did you mean {suggestion}?")
    here = sorted(siblings) or sorted(key for key in candidates if "." not in key)
    return Problem(path, f"unknown key; known: {', '.join(here)}")
