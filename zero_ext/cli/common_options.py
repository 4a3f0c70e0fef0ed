"""Options that several commands have, so that one meaning has one name, and the text of their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

OUTPUT = "Output"

AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on stdout.", rich_help_panel=OUTPUT)
]
Write = Annotated[
    Path | None, typer.Option(help="Write the best configuration to this JSON file.", rich_help_panel=OUTPUT)
]
Machine = Annotated[
    str,
    typer.Option(
        help="Machine with its rates and sizes: dgx2-v100, dgx-a100, dgx-h100, dgx-h200, or a JSON file "
        "from `zero-ext env --measure`."
    ),
]
NvmePath = Annotated[list[str] | None, typer.Option(help="Folder on NVMe. Repeat it for several devices.")]
Sequence = Annotated[int | None, typer.Option("--seq", min=1, max=1 << 24, help="Tokens per sample.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="JSON file with a configuration.")]

CheckpointFolder = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="A checkpoint, or the folder that holds several.")
]
OutputFolder = Annotated[
    Path, typer.Argument(metavar="OUTPUT", help="Folder for the result. It is created if it is missing.")
]
Step = Annotated[int | None, typer.Option(min=0, help="Training step to read. The latest by default.")]


def unwrapped(docstring: str | None) -> str:
    """Return a docstring with each paragraph on one line, so that help wraps it to the terminal."""
    return "\n\n".join(" ".join(each.split()) for each in (docstring or "").split("\n\n"))


def examples(*commands: str) -> str:
    """Return the end of a command's help: its examples, one per line."""
    return "\n".join(["[bold]Examples[/]", *(f"zero-ext {command}" for command in commands)])
