"""Everything that all commands share: consoles, JSON on stdout, errors and exit statuses."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any, cast

import typer
from rich.console import Console
from rich.markup import escape

from zero_ext.config import ZeroConfig

NEGATIVE, WRONG_USAGE = 1, 2
EXIT_STATUSES = {
    0: "Done. If the command answers a question, the answer is yes.",
    NEGATIVE: "The answer is no (nothing fits, data is damaged), or the work failed.",
    WRONG_USAGE: "Wrong usage: an option, a value or a configuration is not valid.",
}
_ENDS = (signal.SIGTERM, signal.SIGHUP)

_PIPE_COLUMNS = 170


def terminal(most_columns: int = _PIPE_COLUMNS, *, stderr: bool = False) -> Console:
    """Return a console with colors on terminals only, and never where NO_COLOR is set.

    Args:
        most_columns: width limit. Files and pipes get lines for exactly this limit, without trailing spaces.
        stderr: for progress and notes that are no part of the result.
    """
    colors: Any = None if os.environ.get("NO_COLOR") else "auto"
    console = Console(stderr=stderr, color_system=colors)
    if console.is_terminal:
        console.width = min(console.width, most_columns)
        return console
    file = cast(IO[str], _WithoutTrailingSpaces(console.file))
    return Console(file=file, width=most_columns, color_system=colors)


class _WithoutTrailingSpaces:
    """A file or pipe that gets lines without the spaces that fill the last column of a table."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        self._file.write(re.sub(" +$", "", text, flags=re.MULTILINE))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def print_json(values: Any) -> None:
    """Print a result to stdout as JSON."""
    print(json.dumps(values, indent=2))


def write_json(path: Path, values: Any) -> None:
    """Write a JSON file, complete or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def said(config: ZeroConfig) -> dict[str, Any]:
    """Return the keys of a configuration that were set."""
    return config.model_dump(mode="json", exclude_unset=True)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, like "1 rank" or "1,024 ranks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def printable(text: str, lines: bool = False) -> str:
    """Return `text`, which may be of a foreign file, with escapes for all characters that a terminal obeys.

    Control characters, marks of text direction and lone surrogates become like ``\\x1b``. Line ends stay with
    `lines`.
    """
    return "".join(
        each if each.isprintable() or (lines and each == "\n") else each.encode("unicode_escape").decode()
        for each in text
    )


@contextmanager
def errors_on_stderr() -> Iterator[None]:
    """Print one red line instead of a stack trace for errors that the user can fix, and exit.

    A value that is not valid and a file that does not exist exit with ``WRONG_USAGE``, everything else with
    ``NEGATIVE``. Nothing is printed where nobody reads the output any longer, as after ``| head``.
    """
    try:
        yield
    except typer.Exit:  # a RuntimeError
        raise
    except BrokenPipeError:
        # What is still buffered would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(NEGATIVE) from None
    except (ValueError, OSError, RuntimeError, ModuleNotFoundError) as error:
        terminal(stderr=True).print(
            f"[red]error:[/] {escape(printable(str(error), lines=True))}", soft_wrap=True
        )
        wrong = isinstance(error, ValueError | FileNotFoundError)
        raise typer.Exit(WRONG_USAGE if wrong else NEGATIVE) from None


@contextmanager
def cleaned_up_when_ended() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the command like an exception, so that its files are removed."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in _ENDS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
