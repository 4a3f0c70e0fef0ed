"""Options that several commands have, so that one meaning has one name, and commands with many options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer


def output(text: str, *names: str) -> Any:
    """Return an option in the panel of the output, with its help."""
    return typer.Option(*names, help=text, rich_help_panel="Output")


AsJson = Annotated[bool, output("Print the result as JSON on stdout.", "--json")]
Write = Annotated[Path | None, output("Write the best configuration to this JSON file.")]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A preset (llama-7b, 13b, 1t), a number of parameters (7.5B), a Hugging Face config.json, or a "
        "folder with one.",
    ),
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
Experts = Annotated[
    int,
    typer.Option("--ep", min=1, help="Ranks that the experts of each layer are spread over."),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="File with a configuration.")]

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


Options = TypeVar("Options")


def taking(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Turn a function of one ``options`` into a command with its fields as arguments, for typer.

    The fields are annotated as typer wants arguments; those without default are required.
    """

    def decorate(run: Callable[[Options], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            run(options(**values))

        hints = get_type_hints(options, include_extras=True)
        signature = inspect.signature(options)
        parameters = [each.replace(annotation=hints[name]) for name, each in signature.parameters.items()]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = hints
        command.__doc__, command.__name__ = run.__doc__, run.__name__
        return command

    return decorate
