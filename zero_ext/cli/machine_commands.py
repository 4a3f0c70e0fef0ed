"""The commands ``zero-ext env``, ``build`` and ``bench-nvme``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from zero_ext.cli.console import cleaned_up_when_ended, errors_on_stderr, print_json, terminal, write_json
from zero_ext.cli.options import AsJson, output
from zero_ext.plan.parse_sizes import bytes_of


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
    from zero_ext.cli.environment import describe_environment

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
    from zero_ext.cli.environment import build_ahead

    with errors_on_stderr():
        modules = {}
        for module, path in build_ahead(cuda_architectures):
            modules[module] = path
            if not as_json:
                print(f"{module}: {path}")
        if as_json:
            print_json({"modules": modules})


def _measure(path: Path, ranks: int | None, nvme_path: Path | None, as_json: bool) -> None:
    from zero_ext.cli import measure_machine

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
        write_json(path, machine.to_mapping())
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


def bench_nvme(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A folder on the device.")],
    size: Annotated[str, typer.Option(help="Size of the file, such as 1GiB or a number of bytes.")] = "1GiB",
    backends: Annotated[str, typer.Option(help="Such as io_uring,threads. All available by default.")] = "",
    block_bytes: Annotated[str, typer.Option(help="Sizes of a block.")] = "256KiB,1MiB,4MiB",
    queue_depths: Annotated[str, typer.Option(help="Blocks in flight per I/O thread.")] = "8,32",
    io_threads: Annotated[str, typer.Option(help="I/O threads, each with its own queue.")] = "1,2",
    repeats: Annotated[int, typer.Option(min=1, help="Passes per setting. Medians are shown.")] = 3,
    write: Annotated[
        Path | None, output("Write the best `aio` section to this JSON file, and a plot next to it as PNG.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """How fast is my NVMe device, and which settings suit it?

    Writes and reads a file with every combination of settings, and prints the best `aio` section for the
    configuration. The file is removed at the end. The defaults move about 200 GiB and run for minutes.
    """
    from zero_ext.cli.bench_nvme import chosen_grid, measure_and_report

    with errors_on_stderr(), cleaned_up_when_ended():
        grid = chosen_grid(backends, block_bytes, queue_depths, io_threads)
        measure_and_report(path, bytes_of(size, "--size"), grid, repeats, write, as_json)
