"""The command ``zero-ext``: looks into checkpoints and exports them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zero_ext.checkpoint import (
    CheckpointError,
    CheckpointReport,
    export_huggingface,
    inspect_checkpoint,
)

app = typer.Typer(
    help="Look into zero_ext checkpoints and export them.", no_args_is_help=True, add_completion=False
)

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

Directory = Annotated[Path, typer.Argument(help="A checkpoint, or the directory that holds several.")]
Step = Annotated[int | None, typer.Option(help="Which step; by default the latest.")]


@app.command()
def inspect(
    directory: Directory,
    step: Step = None,
    tensors: Annotated[bool, typer.Option(help="List every parameter and buffer.")] = True,
) -> None:
    """Show what a checkpoint holds and verify every byte; exit status 1 if any is damaged."""
    console = Console()
    with _errors_on_stderr():
        report = inspect_checkpoint(directory, step=step)
    _print_summary(console, report)
    if tensors:
        console.print(_tensor_table(report))
    for text in report.damage:
        console.print(f"[red]{escape(text)}", soft_wrap=True)
    if report.damage:
        raise typer.Exit(1)
    console.print(f"every byte of {len(report.file_bytes)} files verified")


@app.command()
def export(
    directory: Directory,
    out: Annotated[Path, typer.Argument(help="Where the safetensors files go; made if missing.")],
    step: Step = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; by default the compute precision.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest file: bytes, or like 5GB, 500MiB.")] = "5GB",
) -> None:
    """Write the weights of a checkpoint as Hugging Face safetensors, one tensor in memory at a time."""
    with _errors_on_stderr():
        limit = _bytes_of(max_shard_size)
        paths = export_huggingface(directory, out, dtype, limit, step=step)
    for path in paths:
        print(path)


@contextmanager
def _errors_on_stderr() -> Iterator[None]:
    try:
        yield
    except (CheckpointError, ValueError, OSError) as error:
        Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None


def _bytes_of(text: str) -> int:
    digits = text.strip().upper()
    unit = digits.lstrip("0123456789.")
    try:
        return int(float(digits[: len(digits) - len(unit)]) * _UNITS[unit.strip()])
    except (KeyError, ValueError, OverflowError):
        raise ValueError(
            f"--max-shard-size is {text!r}; give bytes, or a number with {', '.join(_UNITS)[4:]}"
        ) from None


def _print_summary(console: Console, report: CheckpointReport) -> None:
    console.print(f"{escape(str(report.path))}: step {report.step}, saved by {report.world_size} ranks")
    for kind, size in sorted(report.bytes_by_kind.items()):
        console.print(f"  {escape(kind)}: {size:,} bytes")
    for name, size in report.file_bytes.items():
        console.print(f"  {escape(name)}: {size:,} bytes")


def _tensor_table(report: CheckpointReport) -> Table:
    table = Table("name", "shape", "dtype", "stored")
    for tensor in report.tensors:
        name = " = ".join((tensor.name, *tensor.aliases))
        stored = ", ".join(f"{kind} {size:,}" for kind, size in tensor.bytes_by_kind.items())
        table.add_row(escape(name), str(tensor.shape), tensor.dtype, escape(stored))
    return table


if __name__ == "__main__":
    app()
