"""What all commands share: how errors end them, and how sizes are written."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer
from rich.console import Console
from rich.markup import escape

from zero_ext.checkpoint import CheckpointError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_ENDS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def errors_on_stderr() -> Iterator[None]:
    """One red line and exit status 1 instead of a stack trace, for what the user can mend."""
    try:
        yield
    except (CheckpointError, ValueError, OSError, RuntimeError) as error:
        Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True)
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


def bytes_of(text: str, option: str) -> int:
    """Bytes of ``5GB``, ``500MiB`` or a bare number. ValueError naming ``option`` for anything else."""
    digits = text.strip().upper()
    unit = digits.lstrip("0123456789.")
    try:
        return int(float(digits[: len(digits) - len(unit)]) * _UNITS[unit.strip()])
    except (KeyError, ValueError, OverflowError):
        raise ValueError(
            f"{option} is {text!r}; give bytes, or a number with {', '.join(_UNITS)[4:]}"
        ) from None


def size_text(nbytes: int) -> str:
    """Bytes in the largest binary unit that divides them: 1048576 is ``1 MiB``."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes and nbytes % (1 << power) == 0:
            return f"{nbytes >> power} {unit}"
    return f"{nbytes} B"
