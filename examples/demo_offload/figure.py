"""Plot memory over time, with one column per run and one row for the process and for each tier."""

from __future__ import annotations

import itertools
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from demo.charts import save_chart
from matplotlib import pyplot
from matplotlib.axes import Axes

from demo_offload.timeline import TIERS, Sample
from demo_offload.verdict import MEGA, NAMES, Result
from zero_ext.config.plot_colors import BLUE, GREEN, LIMIT, ORANGE

COLORS = {"process": "#444444", "device": BLUE, "host": ORANGE, "nvme": GREEN}
ROWS = {"process": "process", "device": "device tier", "host": "host tier", "nvme": "NVMe tier"}


def draw_timeline(result: Result, path: Path) -> None:
    """Plot bytes over time with one scale per row, a red line at the cap and gray lines between steps."""
    figure, grid = pyplot.subplots(
        1 + len(TIERS), len(NAMES), figsize=(11, 8.5), sharey="row", sharex="col", layout="constrained"
    )
    for column, (run, title) in enumerate(NAMES.items()):
        samples = result.endings[run].timeline
        for axes, row in zip(grid[:, column], ROWS, strict=True):
            _panel(axes, samples, row, result.watched if row == "process" else row)
        top = grid[0, column]
        under = "no cap" if run == "memory" else result.cap_name
        top.set_title(f"{title}\n{under}: {result.endings[run]}", fontsize=11)
        if run != "memory":
            top.axhline(result.cap_bytes / MEGA, color=LIMIT, linewidth=1.4, label="cap")
        if run == "plain" and samples:
            for axes in grid[:, column]:
                axes.axvline(samples[-1].seconds, color=LIMIT, linewidth=1, linestyle=":")
        grid[-1, column].set_xlabel("seconds")
    for axes, name in zip(grid[:, 0], ROWS.values(), strict=True):
        axes.set_ylabel(f"{name}\nMB (10⁶ bytes)")
        axes.set_ylim(bottom=0)
    grid[0, 0].legend(frameon=False, loc="upper left")
    figure.suptitle(f"Training {result.parameters / MEGA:.0f}M parameters: memory per tier over time")
    save_chart(figure, path)
    pyplot.close(figure)


def _panel(axes: Axes, samples: list[Sample], row: str, column: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    seconds = [sample.seconds for sample in samples]
    held = [getattr(sample, column) / MEGA for sample in samples]
    axes.fill_between(seconds, held, color=COLORS[row], alpha=0.25, linewidth=0)
    axes.plot(seconds, held, color=COLORS[row], linewidth=1.3)
    for before, after in itertools.pairwise(samples):
        if before.step != after.step:
            axes.axvline(after.seconds, color="#bbbbbb", linewidth=0.7, zorder=0)
