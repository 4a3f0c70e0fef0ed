"""Configuration errors: all problems of a configuration together, each named by its key path."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CORRECT_IT = "Correct the value."
SUGGESTIONS = 20  # A file may have thousands of unknown keys. A suggestion compares one with all known keys.
_LONGEST_VALUE_SHOWN = 80
_LONGEST_PATH_SHOWN = 200
_LONGEST_SOURCE_SHOWN = 500
_LONGEST_NAME_COMPARED = 200
_LARGEST_TEXT_BYTES = 2000
_MORE_BYTES = 40  # of the line that counts the problems left out


def show(value: object) -> str:
    """Short text of a value seen and its type, as error messages quote it."""
    try:
        text = repr(value)
    except ValueError:  # python refuses to print integers of thousands of digits
        text = "a value too large to print"
    if len(text) > _LONGEST_VALUE_SHOWN:
        text = text[: _LONGEST_VALUE_SHOWN - 3] + "..."
    return f"{text} ({type(value).__name__})"


def clause_of(cause: object) -> str:
    """Return the text of an error without its last period, to go on inside another error's sentence."""
    return str(cause).removesuffix(".")


def shortened(text: str, longest: int) -> str:
    """Return the text with escapes for what terminals obey, cut to at most `longest` bytes."""
    head = "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text[: longest + 1]
    )
    written = head.encode()
    if len(written) <= longest:
        return head
    return written[: longest - 3].decode(errors="ignore") + "..."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `name`, else one that contains it or is in it, else None."""
    if len(name) > _LONGEST_NAME_COMPARED:
        return None
    names = list(known)
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if found:
        return found[0]
    related = [other for other in names if len(name) >= 4 and (name in other or other in name)]
    return min(related, key=len) if related else None


def join_path(*segments: object) -> str:
    """Join key path segments with dots; an empty first part means the top level, an empty key shows as ''."""
    inner = segments[1:] if segments and segments[0] == "" else segments
    return ".".join(str(segment) or "''" for segment in inner)


@dataclass(frozen=True)
class Problem:
    """One mistake: its key path, what is wrong, what is expected and what to do."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"{shortened(self.path, _LONGEST_PATH_SHOWN)}: {self.text}" if self.path else self.text


class ConfigError(ValueError):
    """A configuration that cannot be used, with every mistake found.

    The text lists as many mistakes as 2,000 bytes hold and counts the others.

    Args:
        problems: one mistake, or all of them.
        source: what was read, such as the path of a file; the text begins with it.

    Attributes:
        problems: every mistake, each with its key path (`path`) and its explanation (`text`).
        source: as given.

    Examples:
        >>> try:
        ...     zero_ext.load_config({"stage": 4, "gradient_cliping": 1.0})
        ... except zero_ext.ConfigError as error:
        ...     print(sorted(error.paths))
        ['gradient_cliping', 'stage']
    """

    def __init__(self, problems: Problem | Sequence[Problem], source: str = "configuration") -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.source = source
        super().__init__(_listed(shortened(source, _LONGEST_SOURCE_SHOWN), self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...], str]]:
        return ConfigError, (self.problems, self.source)

    @property
    def paths(self) -> tuple[str, ...]:
        """The key path of every problem, "" for the configuration as a whole."""
        return tuple(problem.path for problem in self.problems)

    def within(self, source: str) -> ConfigError:
        """Return the same problems under the name of another source.

        Args:
            source: the name, such as the path of the file that was read.

        Returns:
            A new error.
        """
        return ConfigError(self.problems, source)


def _listed(source: str, problems: Sequence[Problem]) -> str:
    """Return the problems of a source as far as an error may be long, and the number of the others."""
    if len(problems) == 1:
        return shortened(f"{source}: {problems[0]}", _LARGEST_TEXT_BYTES)
    text = f"{source}: "
    for number, problem in enumerate(problems):
        left = _LARGEST_TEXT_BYTES - _MORE_BYTES - len(text.encode())
        line = f"\n  - {problem}"
        if number and len(line) > left:
            return f"{text}\n  - and {len(problems) - number} more"
        text += shortened(line, left)
    return text


def wrong_value(expected: str, value: object) -> str:
    """Text of the problem of a key with another value than `expected`."""
    return f"expected {expected}, got {show(value)}. {CORRECT_IT}"


def unknown_key(path: str, known: Iterable[str], suggests: bool = True) -> Problem:
    """Return the problem of an unknown key, with the nearest known key of the same level if it `suggests`
    one.

    `known` are the full paths of the keys that exist on its level (or anywhere, where the level has none
    close).
    """
    if not suggests:
        return Problem(path, "unknown key. Remove it.")
    candidates = list(known)
    parent, _, name = path.rpartition(".")
    by_name = {key.rpartition(".")[2]: key for key in candidates}
    siblings = {key.rpartition(".")[2]: key for key in candidates if key.rpartition(".")[0] == parent}
    for paths in (siblings, by_name):
        if close := nearest(name, paths):
            return Problem(path, f"unknown key. Did you mean {paths[close]}?")
    siblings_or_all = sorted(siblings) or sorted(key for key in candidates if "." not in key)
    return Problem(path, f"unknown key. Remove it, or use one of {', '.join(siblings_or_all)}.")
