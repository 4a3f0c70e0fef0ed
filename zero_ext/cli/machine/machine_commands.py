"""The commands ``zero-ext env`` and ``zero-ext build``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from zero_ext.cli.common_options import AsJson
from zero_ext.cli.console import cleaned_up_when_ended, errors_on_stderr, print_json, terminal


def env(
    measure: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Measure the rates too, in half a minute, and write them to this file for `--machine`.",
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes for --measure. One per device by default.")
    ] = None,
    nvme_path: Annotated[Path | None, typer.Option(help="Folder on NVMe for --measure.")] = None,
    as_json: AsJson = False,
) -> None:
    """What does zero_ext find on this machine, and how fast is it?

    Prints versions, instruction set, memory, devices and I/O backends, with a reason for everything that
    is not available. Paste the output into bug reports.
    """
    from zero_ext.cli.machine.environment import describe_environment

    if measure is not None:
        _measure(measure, ranks, nvme_path, as_json)
        return
    sections = describe_environment(Path.cwd())
    if as_json:
        print_json(sections)
    else:
        _print_sections(sections)


def build(
    cuda_architectures: Annotated[
        str | None,
        typer.Option(help="Such as 8.0,9.0. By default those of the GPUs here, or 8.0,9.0 without a GPU."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """How do I compile the kernels before the first run?

    Compiles what the first use would compile otherwise: the C++ ops and the CUDA kernels. Modules that exist
    stay as they are.
    """
    from zero_ext.cli.machine.prebuild import build_ahead

    with errors_on_stderr():
        modules = {}
        for module, path in build_ahead(cuda_architectures):
            modules[module] = path
            if not as_json:
                print(f"{module}: {path}")
        if as_json:
            print_json({"modules": modules})


def _measure(path: Path, ranks: int | None, nvme_path: Path | None, as_json: bool) -> None:
    from zero_ext.cli.machine import measure_machine

    progress = terminal(stderr=True)
    with errors_on_stderr(), cleaned_up_when_ended():
        if path.suffix != ".json" or not path.absolute().parent.is_dir():
            raise ValueError(
                f"--measure: expected a file ending in .json in a folder that exists, got '{path}'. "
                "Make the folder or name another file."
            )
        machine = measure_machine.measure_machine(
            path.stem, ranks, nvme_path, tick=lambda what: progress.print(f"[dim]{escape(what)}")
        )
        measure_machine.write_machine(machine, path)
    if as_json:
        print_json(machine.to_mapping())
    else:
        _print_sections({str(path): measure_machine.figures(machine)})


def _print_sections(sections: dict[str, dict[str, str]]) -> None:
    table = Table("", "", show_header=False)
    for title, facts in sections.items():
        table.add_row(f"[bold]{escape(title)}", "")
        for name, value in facts.items():
            table.add_row(f"  {escape(name)}", escape(value))
        table.add_section()
    terminal().print(table)
