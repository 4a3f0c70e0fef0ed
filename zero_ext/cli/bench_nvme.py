"""The work of ``zero-ext bench-nvme``: settings measured on a device, shown and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from zero_ext import ops
from zero_ext.cli.console import print_json, terminal, write_json
from zero_ext.cli.nvme_sweep import Contender, Grid, Sweep, fio_installed, sweep_device
from zero_ext.config.plot_colors import SERIES
from zero_ext.plan.parse_sizes import bytes_of, size_text

_COLORS = dict(zip(("io_uring", "libaio", "threads"), SERIES, strict=False))
_LINES = ("-", "--", ":", "-.")


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
        write_json(write, {"aio": sweep.best.section})
        notes.print(f"wrote {escape(str(write))}", soft_wrap=True)
        try:
            plot = plot_sweep(sweep, write.with_suffix(".png"))
            notes.print(f"wrote {escape(str(plot))}", soft_wrap=True)
        except ModuleNotFoundError:
            notes.print("no plot: matplotlib is not installed (pip install matplotlib)")
    if as_json:
        print_json(sweep_as_json(sweep))
    else:
        notes.print(sweep_table(sweep))
        notes.print(json.dumps({"aio": sweep.best.section}), soft_wrap=True)


def _say_what_is_missing(console: Console, left_out: int, nbytes: int) -> None:
    for name, reason in ops.aio_backends().items():
        if reason:
            console.print(f"{name} is not available: {escape(reason)}", soft_wrap=True)
    if not fio_installed():
        console.print("fio is not installed, so there is no figure of its (apt-get install fio)")
    if left_out:
        console.print(f"{left_out} settings left out: they keep more than {size_text(nbytes)} in flight")


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


def sweep_table(sweep: Sweep) -> Table:
    """Return one row a contender, ours sorted by speed, the chosen one marked."""
    plain = sweep.peers[0]
    table = Table(
        title=f"{sweep.path}: {size_text(sweep.nbytes)}, medians of {len(plain.reads)}", title_justify="left"
    )
    for column in ("", "block", "depth", "io_threads", "read GB/s", "write GB/s", "of plain", "CPU s/GB"):
        table.add_column(column, justify="right" if column else "left")
    for contender in (*sweep.peers, *sorted(sweep.engine, key=lambda each: each.both_seconds)):
        setting, sizes = contender.setting, ("", "", "")
        if setting is not None:
            sizes = size_text(setting.block_bytes), str(setting.queue_depth), str(setting.io_threads)
        table.add_row(
            contender.name if setting is None else setting.backend,
            *sizes,
            f"{_rate(contender, sweep.nbytes, False):.2f}",
            f"{_rate(contender, sweep.nbytes, True):.2f}",
            f"{plain.both_seconds / contender.both_seconds:.2f}",
            f"{contender.processor_seconds / (2 * sweep.nbytes) * 1e9:.3f}",
            style="bold green" if contender is sweep.best else None,
            end_section=contender is sweep.peers[-1],
        )
    return table


def sweep_as_json(sweep: Sweep) -> dict[str, Any]:
    """Return the best section and the rates of every contender, in bytes and seconds."""

    def row(contender: Contender) -> dict[str, Any]:
        return {
            "name": contender.name,
            **contender.section,
            "read_bytes_per_second": sweep.nbytes / contender.seconds(False),
            "write_bytes_per_second": sweep.nbytes / contender.seconds(True),
            "processor_seconds": contender.processor_seconds,
        }

    return {
        "path": str(sweep.path),
        "bytes": sweep.nbytes,
        "why_not_direct": sweep.why_not_direct or None,
        "aio": sweep.best.section,
        "engine": [row(each) for each in sweep.engine],
        "peers": [row(each) for each in sweep.peers],
    }


def plot_sweep(sweep: Sweep, path: Path) -> Path:
    """Draw speed over block size, a line for each backend, depth and number of I/O threads, as a PNG.

    ModuleNotFoundError where matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, both = pyplot.subplots(1, 2, figsize=(13, 4.8))
    lines = _lines(sweep)
    shapes = sorted({key[1:] for key in lines})
    for axes, writing in zip(both, (False, True), strict=True):
        for (backend, depth, io_threads), members in sorted(lines.items()):
            style = _LINES[shapes.index((depth, io_threads)) % len(_LINES)]
            axes.plot(
                [size_text(block) for block, _ in members],
                [_rate(each, sweep.nbytes, writing) for _, each in members],
                color=_COLORS.get(backend, "black"),
                linestyle=style,
                marker="o",
                label=f"{backend}, depth {depth}, {io_threads} thread{'s' if io_threads > 1 else ''}",
            )
        for peer, style in zip(sweep.peers, _LINES, strict=False):
            axes.axhline(_rate(peer, sweep.nbytes, writing), color="black", linestyle=style, label=peer.name)
        axes.set_title("write" if writing else "read")
        axes.set_xlabel("block")
        axes.set_ylabel("GB/s")
        axes.set_ylim(bottom=0)
    both[1].legend(fontsize=7, handlelength=4, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _lines(sweep: Sweep) -> dict[tuple[str, int, int], list[tuple[int, Contender]]]:
    lines: dict[tuple[str, int, int], list[tuple[int, Contender]]] = {}
    for contender in sweep.engine:
        setting = contender.setting
        if setting is not None:
            key = (setting.backend, setting.queue_depth, setting.io_threads)
            lines.setdefault(key, []).append((setting.block_bytes, contender))
    return {key: sorted(members, key=lambda member: member[0]) for key, members in lines.items()}


def _rate(contender: Contender, nbytes: int, writing: bool) -> float:
    return nbytes / contender.seconds(writing) / 1e9
