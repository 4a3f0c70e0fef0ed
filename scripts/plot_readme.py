"""Draw the plots of README.md into docs/images, each for light and for dark pages.

``python -m scripts.plot_readme`` redraws them: how state is placed in each stage, and two charts of
``benchmarks/results``. Each SVG file holds the figures that it shows as metadata, so a test can compare them
with the results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.import_graph import ROOT
from zero_ext.config.plot_colors import BLUE, GRAY, GREEN, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "results"
THEMES = ("light", "dark")
_MODEL = "239m"
_MEMORY = [
    ("stage 3", "stage3", [("FSDP2", "fsdp2"), ("DeepSpeed", "deepspeed3")]),
    ("stage 2", "stage2", [("FSDP2", "fsdp2-keep"), ("DeepSpeed", "deepspeed2")]),
    ("stage 1", "stage1", [("DDP", "ddp"), ("DeepSpeed", "deepspeed1")]),
]
_SPEED = [
    ("stage 3 / FSDP2", "stage3", "fsdp2"),
    ("stage 3 / DeepSpeed", "stage3", "deepspeed3"),
    ("stage 2 / FSDP2", "stage2", "fsdp2-keep"),
    ("stage 2 / DeepSpeed", "stage2", "deepspeed2"),
    ("stage 1 / DDP", "stage1", "ddp"),
]


@dataclass(frozen=True)
class Theme:
    """Colors of one theme."""

    ink: str
    faint: str
    params: str = BLUE
    grads: str = ORANGE
    optimizer: str = GREEN
    peer: str = GRAY


_THEMES = {"light": Theme("#1f2a37", "#c3ccd6"), "dark": Theme("#e6edf3", "#4a5561", peer="#7d8894")}


def memory_figures() -> list[tuple[str, str, float]]:
    """Stage, library, and the peak of a rank's whole process in GB (10⁹ bytes)."""
    peaks = json.loads((RESULTS / "memory.json").read_text())["resident"][_MODEL]
    found = []
    for stage, own, peers in _MEMORY:
        for title, key in [("zero_ext", own), *peers]:
            peak = peaks[key].get("overall_peak") or peaks[key]["whole_peak"]  # its name in older results
            found.append((stage, title, round(peak / 1e9, 2)))
    return found


def step_comparisons() -> list[dict[str, Any]]:
    """The comparisons of step times that the plot is of."""
    found: list[dict[str, Any]] = json.loads((RESULTS / f"step-{_MODEL}.json").read_text())["comparisons"]
    return found


def _ends(ratio: dict[str, Any]) -> tuple[str, str]:
    return ("low", "high") if "low" in ratio else ("lowest", "highest")


def speed_figures() -> list[tuple[str, float, float, float]]:
    """Pair, and the median ratio of step times with its interval, or its range where none was recorded."""
    ratios = {(each["subject"], each["peer"]): each["ratio"] for each in step_comparisons()}
    return [
        (title, *(round(ratios[own, peer][name], 2) for name in ("median", *_ends(ratios[own, peer]))))
        for title, own, peer in _SPEED
    ]


def shown_in(file: Path) -> Any:
    """Return the figures that a plot shows."""
    found = re.search(r"<dc:description>(.*?)</dc:description>", file.read_text(), re.DOTALL)
    return None if found is None else json.loads(" ".join(found[1].split()))


def _draw_memory(axes: Axes, theme: Theme) -> None:
    position, ticks = 0.0, []
    rows = memory_figures()
    for number, (stage, title, value) in enumerate(rows):
        if number and rows[number - 1][0] != stage:
            position += 0.6
        own = title == "zero_ext"
        axes.barh(position, value, 0.8, color=theme.params if own else theme.peer)
        axes.text(value + 0.06, position, f"{value:.1f}", va="center", color=theme.ink)
        ticks.append((position, f"{title} {stage}" if own else title))
        position += 1
    axes.set_yticks([each for each, _ in ticks], [title for _, title in ticks])
    axes.invert_yaxis()
    axes.set_xlim(0, 6.2)
    axes.set_title("Peak memory of a rank's process, GB", loc="left", color=theme.ink)


def _draw_speed(axes: Axes, theme: Theme) -> None:
    for position, (_, median, low, high) in enumerate(speed_figures()):
        axes.barh(position, median, 0.62, color=theme.params)
        axes.plot([low, high], [position, position], color=theme.ink, linewidth=1.4)
        axes.text(max(high, median) + 0.02, position, f"{median:.2f}", va="center", color=theme.ink)
    axes.axvline(1, color=theme.ink, linewidth=1, linestyle="--")
    axes.text(0.99, -0.75, "as slow as the peer", ha="right", va="center", color=theme.ink)
    axes.set_yticks(range(len(_SPEED)), [title for title, _, _ in _SPEED])
    axes.set_ylim(len(_SPEED) - 0.5, -1.1)
    axes.set_xlim(0, 1.1)
    axes.set_title("Time of a step: zero_ext / peer", loc="left", color=theme.ink)


def _draw_stages(axes: Axes, theme: Theme) -> None:
    """Two ranks in each stage: what each holds of parameters, gradients and optimizer state, and below them
    the tiers that a rank's share may be in."""
    from matplotlib.patches import FancyBboxPatch, Rectangle

    kinds: Sequence[tuple[str, str, float, int]] = (
        ("params", theme.params, 0.5, 3),
        ("grads", theme.grads, 0.5, 2),
        ("optimizer", theme.optimizer, 1.5, 1),
    )
    for stage in range(4):
        left = stage * 3.0
        axes.text(left + 1.2, 3.42, f"stage {stage}", ha="center", color=theme.ink, fontweight="bold")
        for rank in range(2):
            x = left + rank * 1.25
            axes.text(x + 0.5, 3.08, f"rank {rank}", ha="center", color=theme.ink, fontsize=8)
            y = 2.95
            for _, color, height, sharded_from in kinds:
                y -= height
                axes.add_patch(Rectangle((x, y), 1, height - 0.06, fill=False, edgecolor=theme.faint))
                sharded = stage >= sharded_from
                own = (height - 0.06) / 2 if sharded else height - 0.06
                at = y + own * (1 - rank) if sharded else y
                axes.add_patch(Rectangle((x, at), 1, own, color=color, linewidth=0))
    for number, title in enumerate(("device memory", "host memory", "NVMe")):
        box = FancyBboxPatch(
            (number * 3.95, -0.62), 3.4, 0.5, boxstyle="round,pad=0.05", fill=False, edgecolor=theme.ink
        )
        axes.add_patch(box)
        axes.text(number * 3.95 + 1.7, -0.37, title, ha="center", va="center", color=theme.ink)
        if number:
            axes.annotate(
                "",
                (number * 3.95 - 0.08, -0.37),
                (number * 3.95 - 0.47, -0.37),
                arrowprops={"arrowstyle": "<|-|>", "color": theme.ink},
            )
    axes.text(0, 0.08, "each kind of sharded state in the tier of your choice", color=theme.ink, fontsize=9)
    for number, (title, color, _, _) in enumerate(kinds):
        label = {"params": "parameters", "grads": "gradients", "optimizer": "optimizer state"}[title]
        axes.add_patch(Rectangle((6.1 + number * 1.95, 0.1), 0.18, 0.18, color=color, linewidth=0))
        axes.text(6.36 + number * 1.95, 0.19, label, va="center", color=theme.ink, fontsize=9)
    axes.set_xlim(-0.1, 11.45)
    axes.set_ylim(-0.75, 3.7)
    axes.set_axis_off()


PLOTS: dict[str, tuple[Callable[[Any, Theme], None], tuple[float, float], Callable[[], Any]]] = {
    "stages": (_draw_stages, (9.0, 3.5), lambda: None),
    "memory": (_draw_memory, (6.0, 3.4), lambda: [list(each) for each in memory_figures()]),
    "speed": (_draw_speed, (6.0, 2.6), lambda: [list(each) for each in speed_figures()]),
}


def plot(folder: Path = FOLDER) -> None:
    """Draw all plots into ``folder``."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "readme", "svg.fonttype": "none", "font.size": 10})
    from matplotlib import pyplot

    for name, (draw, size, figures) in PLOTS.items():
        for theme_name in THEMES:
            theme = _THEMES[theme_name]
            figure, axes = pyplot.subplots(figsize=size)
            draw(axes, theme)
            axes.tick_params(colors=theme.ink, length=0)
            for side, spine in axes.spines.items():
                spine.set_visible(side == "bottom")
                spine.set_color(theme.faint)
            figure.tight_layout(pad=0.4)
            metadata = {"Description": json.dumps(figures()), "Date": None, "Creator": None}
            figure.savefig(folder / f"{name}_{theme_name}.svg", transparent=True, metadata=metadata)
            pyplot.close(figure)


if __name__ == "__main__":
    plot()
