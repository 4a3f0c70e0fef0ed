"""Draw the plots of README.md into docs/images, each for light and for dark pages.

``python -m scripts.plot_readme`` redraws them: how state is placed in each stage, and a chart of
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
from zero_ext.config.plot_colors import BLUE, GREEN, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "results"
THEMES = ("light", "dark")
_SPEED_MODEL = "34m"
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


_THEMES = {"light": Theme("#1f2a37", "#c3ccd6"), "dark": Theme("#e6edf3", "#4a5561")}


def speed_figures() -> list[tuple[str, float, float, float]]:
    """Pair, and the median ratio of step times with its 95% interval."""
    compared = json.loads((RESULTS / f"step-{_SPEED_MODEL}.json").read_text())["comparisons"]
    ratios = {(each["subject"], each["peer"]): each["ratio"] for each in compared}
    return [
        (title, *(round(ratios[own, peer][name], 2) for name in ("median", "low", "high")))
        for title, own, peer in _SPEED
    ]


def shown_in(file: Path) -> Any:
    """Return the figures that a plot shows."""
    found = re.search(r"<dc:description>(.*?)</dc:description>", file.read_text(), re.DOTALL)
    return None if found is None else json.loads(" ".join(found[1].split()))


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
