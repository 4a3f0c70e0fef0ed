"""What all commands share: how errors end them, and where they print."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer
from rich.console import Console
from rich.markup import escape

_ENDS = (signal.SIGTERM, signal.SIGHUP)

_PIPE_WIDTH = 170


def terminal() -> Console:
    """A console; one that writes to a file or pipe gets lines wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_WIDTH)


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
    """One red line and exit status 1 instead of a stack trace, for what the user can mend.

    Silent where nobody reads the output any longer, as after ``| head``.
    """
    try:
        yield
    except BrokenPipeError:
        # What is still buffered would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except (ValueError, OSError, RuntimeError, ModuleNotFoundError) as error:
        Console(stderr=True).print(
            f"[red]error:[/] {escape(printable(str(error), lines=True))}", soft_wrap=True
        )
        raise typer.Exit(1) from None


@contextmanager
def cleaned_up_when_ended() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP end the command like an exception, so that its files are removed."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in _ENDS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
