"""The command ``zero-ext bench-nvme`` and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zero_ext.cli.common_options import OUTPUT, AsJson
from zero_ext.cli.console import cleaned_up_when_ended, errors_on_stderr
from zero_ext.plan.parse_sizes import bytes_of


def bench_nvme(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A folder on the device.")],
    size: Annotated[str, typer.Option(help="Size of the file, such as 1GiB or a number of bytes.")] = "1GiB",
    backends: Annotated[str, typer.Option(help="Such as io_uring,threads. All available by default.")] = "",
    block_bytes: Annotated[str, typer.Option(help="Sizes of a block.")] = "256KiB,1MiB,4MiB",
    queue_depths: Annotated[str, typer.Option(help="Blocks in flight per I/O thread.")] = "8,32",
    io_threads: Annotated[str, typer.Option(help="I/O threads, each with its own queue.")] = "1,2",
    repeats: Annotated[int, typer.Option(min=1, help="Passes per setting. Medians are shown.")] = 3,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Write the best `aio` section to this JSON file, and a plot next to it as PNG.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """How fast is my NVMe device, and which settings suit it?

    Writes and reads a file with every combination of settings, and prints the best `aio` section for the
    configuration. The file is removed at the end. The defaults move about 200 GiB and run for minutes.
    """
    from zero_ext.cli.nvme.bench_nvme import chosen_grid, measure_and_report

    with errors_on_stderr(), cleaned_up_when_ended():
        grid = chosen_grid(backends, block_bytes, queue_depths, io_threads)
        measure_and_report(path, bytes_of(size, "--size"), grid, repeats, write, as_json)
