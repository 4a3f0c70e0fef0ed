"""A sweep as a table, as JSON, as a plot, and as a section of a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from zero_ext.cli.nvme.nvme_sweep import Contender, Sweep
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.config.plot_colors import SERIES
from zero_ext.plan.parse_sizes import size_text

_COLORS = dict(zip(("io_uring", "libaio", "threads"), SERIES, strict=False))
_LINES = ("-", "--", ":", "-.")


def sweep_table(sweep: Sweep) -> Table:
    """Return one row a contender, ours sorted by speed, the chosen one marked."""
    plain = sweep.peers[0]
    table = Table(
        title=f"{sweep.path}: {size_text(sweep.nbytes)}, medians of {len(plain.reads)}", title_justify="left"
    )
    for column in ("", "block", "depth", "io_threads", "read GB/s", "write GB/s", "of plain", "CPU s/GB"):
        table.add_column(column, justify="left" if not column else "right")
    for contender in sweep.peers:
        table.add_row(contender.name, "", "", "", *_figures(contender, plain, sweep.nbytes))
    table.add_section()
    for contender in sorted(sweep.engine, key=lambda each: each.both_seconds):
        setting = contender.setting
        if setting is None:
            raise zero_ext_bug(f"{contender.name} has no setting")
        table.add_row(
            setting.backend,
            size_text(setting.block_bytes),
            str(setting.queue_depth),
            str(setting.io_threads),
            *_figures(contender, plain, sweep.nbytes),
            style="bold green" if contender is sweep.best else None,
        )
    return table


def sweep_as_json(sweep: Sweep) -> dict[str, Any]:
    """Return the best section and the rates of every contender, in bytes and seconds."""
    return {
        "path": str(sweep.path),
        "bytes": sweep.nbytes,
        "why_not_direct": sweep.why_not_direct or None,
        "aio": None if sweep.best.setting is None else sweep.best.setting.section(),
        "engine": [_contender_as_json(each, sweep.nbytes) for each in sweep.engine],
        "peers": [_contender_as_json(each, sweep.nbytes) for each in sweep.peers],
    }


def _contender_as_json(contender: Contender, nbytes: int) -> dict[str, Any]:
    return {
        "name": contender.name,
        **({} if contender.setting is None else contender.setting.section()),
        "read_bytes_per_second": nbytes / contender.seconds(False),
        "write_bytes_per_second": nbytes / contender.seconds(True),
        "processor_seconds": contender.processor_seconds,
    }


def write_section(sweep: Sweep, path: Path) -> Path:
    """Write the best setting as a JSON file that ``load_config`` reads, complete or not at all."""
    if sweep.best.setting is None:
        raise zero_ext_bug("the best contender has no setting")
    text = json.dumps({"aio": sweep.best.setting.section()}, indent=2) + "\n"
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


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


def _figures(contender: Contender, plain: Contender, nbytes: int) -> tuple[str, str, str, str]:
    return (
        f"{_rate(contender, nbytes, False):.2f}",
        f"{_rate(contender, nbytes, True):.2f}",
        f"{plain.both_seconds / contender.both_seconds:.2f}",
        f"{contender.processor_seconds / (2 * nbytes) * 1e9:.3f}",
    )


def _rate(contender: Contender, nbytes: int, writing: bool) -> float:
    return nbytes / contender.seconds(writing) / 1e9
