"""``zero-ext import-deepspeed``: a DeepSpeed checkpoint becomes one of zero_ext's."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from zero_ext.cli.common_options import AsJson, OutputFolder
from zero_ext.cli.console import cleaned_up_when_ended, errors_on_stderr, print_json, printable, terminal

if TYPE_CHECKING:
    from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_import import ImportedCheckpoint


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
