"""The work of ``zero-ext bench-nvme``: settings measured on a device, shown and written."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from zero_ext import ops
from zero_ext.cli.console import print_json, terminal
from zero_ext.cli.nvme.fio import fio_installed
from zero_ext.cli.nvme.nvme_report import plot_sweep, sweep_as_json, sweep_table, write_section
from zero_ext.cli.nvme.nvme_sweep import Grid, Sweep, sweep_device
from zero_ext.plan.parse_sizes import bytes_of, size_text


def chosen_grid(backends: str, blocks: str, depths: str, io_threads: str) -> Grid:
    """Return the grid that the comma-separated options name; no backends means all that are available.

    ValueError naming the option; RuntimeError with the reason for a backend that is not available.
    """
    reasons = ops.aio_backends()
    names = _items(backends) or tuple(name for name, reason in reasons.items() if not reason)
    for name in names:
        if name not in reasons:
            raise ValueError(
                f"--backends: expected some of {', '.join(reasons)}, got {name!r}. Name one of those."
            )
        if reasons[name]:
            raise RuntimeError(
                f"--backends: {name!r} is not available here: {reasons[name]}. Leave it out of --backends."
            )
    sizes = tuple(bytes_of(item, "--block-bytes") for item in _items(blocks) or ("",))
    return Grid(names, sizes, _numbers(depths, "--queue-depths"), _numbers(io_threads, "--io-threads"))


def measure_and_report(
    path: Path, nbytes: int, grid: Grid, repeats: int, write: Path | None, as_json: bool
) -> None:
    """Run the sweep with a progress bar, print its result, and write the best section and the plot.

    With ``as_json`` stdout holds JSON only, and notes go to stderr. Errors of :func:`sweep_device`;
    ValueError if ``write`` is not a valid path for the files, before measuring.
    """
    _check_write(write)
    notes = terminal(stderr=as_json)
    settings, left_out = grid.settings(nbytes)
    _say_what_is_missing(notes, len(left_out), nbytes)
    passes = 2 * repeats * len(settings)
    notes.print(
        f"{len(settings)} settings, each written and read {repeats} ×: "
        f"{passes * nbytes / 1e9:,.1f} GB to move"
    )
    with Progress(console=notes, transient=True) as progress:
        task = progress.add_task("", total=None)
        sweep = sweep_device(
            path, nbytes, settings, repeats, lambda name: progress.update(task, description=name, advance=1)
        )
    if sweep.why_not_direct:
        notes.print(
            f"[yellow]not the device but the page cache was measured:[/] {escape(sweep.why_not_direct)}",
            soft_wrap=True,
        )
    if write is not None:
        _write(notes, sweep, write)
    if as_json:
        print_json(sweep_as_json(sweep))
    else:
        _print_sweep(notes, sweep)


def _print_sweep(console: Console, sweep: Sweep) -> None:
    console.print(sweep_table(sweep))
    setting = sweep.best.setting
    if setting is not None:
        console.print(json.dumps({"aio": setting.section()}), soft_wrap=True)


def _say_what_is_missing(console: Console, left_out: int, nbytes: int) -> None:
    for name, reason in ops.aio_backends().items():
        if reason:
            console.print(f"{name} is not available: {escape(reason)}", soft_wrap=True)
    if not fio_installed():
        console.print("fio is not installed, so there is no figure of its (apt-get install fio)")
    if left_out:
        console.print(f"{left_out} settings left out: they keep more than {size_text(nbytes)} in flight")


def _write(console: Console, sweep: Sweep, output: Path) -> None:
    console.print(f"wrote {escape(str(write_section(sweep, output)))}", soft_wrap=True)
    try:
        plot = plot_sweep(sweep, output.with_suffix(".png"))
    except ModuleNotFoundError:
        console.print("no plot: matplotlib is not installed (pip install matplotlib)")
    else:
        console.print(f"wrote {escape(str(plot))}", soft_wrap=True)


def _check_write(write: Path | None) -> None:
    if write is None:
        return
    if write.suffix != ".json" or write.is_dir():
        raise ValueError(
            f"--write: expected a file name that ends in .json, got '{write}'. Name such a file."
        )
    if not write.absolute().parent.is_dir():
        raise ValueError(
            f"--write: expected a file in a folder that exists, got '{write}'. Make "
            f"'{write.absolute().parent}' first."
        )


def _items(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (item.strip() for item in text.split(","))))


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(item) for item in _items(text) or ("",))
    except ValueError:
        raise ValueError(
            f"{option}: expected whole numbers separated by commas, got {text!r}. Write for example 1,8,32."
        ) from None
