"""The commands ``zero-ext inspect``, ``export`` and ``import-deepspeed``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from zero_ext.cli.console import (
    NEGATIVE,
    cleaned_up_when_ended,
    counted,
    errors_on_stderr,
    print_json,
    printable,
    terminal,
)
from zero_ext.cli.options import AsJson, CheckpointFolder, OutputFolder, Step
from zero_ext.plan.parse_sizes import bytes_of

if TYPE_CHECKING:
    from zero_ext.checkpoint import CheckpointReport
    from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_import import ImportedCheckpoint


def inspect(
    folder: CheckpointFolder,
    step: Step = None,
    tensors: Annotated[bool, typer.Option(help="List every parameter and buffer.")] = True,
    as_json: AsJson = False,
) -> None:
    """What is in my checkpoint, and is every byte intact?

    Lists parameters, buffers and optimizer state, and verifies all checksums. Exit status 1 if a file is
    damaged.
    """
    from zero_ext.checkpoint import inspect_checkpoint

    with errors_on_stderr():
        report = inspect_checkpoint(folder, step=step)
    if as_json:
        print_json(_report_as_json(report, tensors))
    else:
        _print_report(terminal(), report, tensors)
    if report.damage:
        raise typer.Exit(NEGATIVE)


def export(
    folder: CheckpointFolder,
    output: OutputFolder,
    step: Step = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. The compute precision by default.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Largest file, such as 5GB, 500MiB or a number of bytes.")
    ] = "5GB",
    as_json: AsJson = False,
) -> None:
    """How do I get my trained weights into Hugging Face format?

    Writes the weights of a checkpoint as safetensors, with one tensor in memory at a time.
    """
    from zero_ext.checkpoint import export_huggingface

    with errors_on_stderr():
        limit = bytes_of(max_shard_size, "--max-shard-size")
        paths = [str(path) for path in export_huggingface(folder, output, dtype, limit, step=step)]
    if as_json:
        print_json({"files": paths})
        return
    for path in paths:
        print(path)


def _report_as_json(report: CheckpointReport, tensors: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "path": str(report.path),
        "step": report.step,
        "world_size": report.world_size,
        "bytes_by_kind": report.bytes_by_kind,
        "file_bytes": report.file_bytes,
        "damage": list(report.damage),
    }
    if tensors:
        found["tensors"] = [{**asdict(tensor), "shape": list(tensor.shape)} for tensor in report.tensors]
    return found


def _print_report(console: Console, report: CheckpointReport, tensors: bool) -> None:
    saved_by = counted(report.world_size, "rank")
    console.print(
        f"{escape(printable(str(report.path)))}: step {report.step}, saved by {saved_by}", soft_wrap=True
    )
    for kind, size in sorted(report.bytes_by_kind.items()):
        console.print(f"  {escape(printable(kind))}: {size:,} bytes")
    for name, size in report.file_bytes.items():
        console.print(f"  {escape(printable(name))}: {size:,} bytes")
    if tensors:
        console.print(_tensor_table(report))
    for text in report.damage:
        console.print(f"[red]{escape(printable(text))}", soft_wrap=True)
    if not report.damage:
        console.print(f"every byte of {counted(len(report.file_bytes), 'file')} verified")


def _tensor_table(report: CheckpointReport) -> Table:
    table = Table("name", "shape", "dtype", "stored")
    for tensor in report.tensors:
        name = " = ".join((tensor.name, *tensor.aliases))
        stored = ", ".join(f"{kind} {size:,}" for kind, size in tensor.bytes_by_kind.items())
        table.add_row(escape(printable(name)), str(tensor.shape), tensor.dtype, escape(printable(stored)))
    return table


def import_deepspeed(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="The folder of DeepSpeed's save_checkpoint, or one tag in it."),
    ],
    output: OutputFolder,
    tag: Annotated[
        str | None, typer.Option(help="Such as global_step100. By default the tag in the file 'latest'.")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="Optimizer class, such as AdamW, where the checkpoint does not name it."),
    ] = None,
    verify: Annotated[bool, typer.Option(help="Compare the checksums of all files first.")] = True,
    as_json: AsJson = False,
) -> None:
    """How do I continue from a checkpoint that DeepSpeed wrote?

    Converts a checkpoint of ZeRO stages 1 to 3 without running any code that is stored in it.
    """
    with errors_on_stderr(), cleaned_up_when_ended():
        found = _import_with_progress(folder, output, tag, optimizer, verify)
        if as_json:
            print_json({**asdict(found), "path": str(found.path), "source": str(found.source)})
        else:
            _print_import(terminal(), found, output)


def _import_with_progress(
    folder: Path, output: Path, tag: str | None, optimizer: str | None, verify: bool
) -> ImportedCheckpoint:
    # Late: the other commands need nothing of it.
    from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_import import import_deepspeed_checkpoint

    console = terminal(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("checking" if not verify else "verifying", total=None)

        def advance(done: int, ranks: int) -> None:
            bar.update(task, description="files of ranks", completed=done, total=ranks)

        return import_deepspeed_checkpoint(
            folder, output, tag=tag, optimizer=optimizer, verify=verify, progress=advance
        )


def _print_import(console: Console, found: ImportedCheckpoint, output: Path) -> None:
    table = Table("", "", show_header=False)
    for name, value in (
        ("read", str(found.source)),
        ("saved by", f"DeepSpeed ZeRO stage {found.stage} on {found.ranks} ranks"),
        ("written", str(found.path)),
        ("step", f"{found.step:,}"),
        ("parameters", f"{found.parameters:,} with {found.elements:,} elements"),
        ("optimizer", found.optimizer),
        ("bytes", f"{found.bytes_written:,}"),
    ):
        table.add_row(f"[bold]{name}", Text(printable(value)))
    console.print(table)
    console.print(Text(f"load it with zero_ext.load_checkpoint({str(output)!r}, model)"), soft_wrap=True)
