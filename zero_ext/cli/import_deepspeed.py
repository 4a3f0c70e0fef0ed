"""``zero-ext import-deepspeed``: a DeepSpeed checkpoint becomes one of zero_ext's."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from zero_ext.cli.console import printable


def import_and_report(
    console: Console, folder: Path, output: Path, tag: str | None, optimizer: str | None, verify: bool
) -> None:
    """Imports with a bar over the ranks' files and prints what came of it.

    Errors are those of ``import_deepspeed_checkpoint``.
    """
    # Late: the other commands need nothing of it.
    from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_import import import_deepspeed_checkpoint

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

        found = import_deepspeed_checkpoint(
            folder, output, tag=tag, optimizer=optimizer, verify=verify, progress=advance
        )
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
