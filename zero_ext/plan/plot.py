"""A plan as a plot: a stacked bar for every placement and tier, as a share of the tier's capacity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zero_ext.config.plot_colors import KINDS as COLORS
from zero_ext.config.plot_colors import LIMIT
from zero_ext.config.tiers import CAPACITIES, Tier
from zero_ext.plan.planner import Plan

_TITLES = {"device": "GPU memory", "host": "host memory", "nvme": "NVMe of a host"}
_LONGEST = 1.5  # times the capacity: longer bars are cut there, and their label says the bytes
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1.0, "bytes"))


def plot_plan(plan: Plan, path: Path) -> Path:
    """Draw ``plan`` to ``path`` and return it.

    Args:
        plan: The placements. The recommended one is marked.
        path: A PNG, SVG or PDF file, by its suffix.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "--plot: expected matplotlib, which is not installed. Install it with pip install matplotlib."
        ) from None
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    with matplotlib.rc_context({"font.size": 12}):
        figure = Figure(figsize=(13, 0.45 * len(plan.entries) + 2.4), layout="constrained")
        panels = figure.subplots(1, len(CAPACITIES), sharey=True)
        kinds: set[str] = set()
        for axes, tier in zip(panels, CAPACITIES, strict=True):
            kinds |= _draw_tier(axes, plan, tier)
        panels[0].set_yticks(range(len(plan.entries)), [str(row.candidate) for row in plan.entries])
        panels[0].invert_yaxis()
        for label, row in zip(panels[0].get_yticklabels(), plan.entries, strict=True):
            label.set_fontweight("bold" if plan.recommends(row) else "normal")
        handles = [Patch(color=color, label=kind) for kind, color in COLORS.items() if kind in kinds]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
        notes = ["bold: recommended"] * (plan.recommendation is not None) + ["pale: more than there is"]
        gpus = f"{plan.gpus} GPU{'s' * (plan.gpus > 1)}"
        figure.suptitle(f"{plan.model.name} on {gpus}, {plan.hardware.name} ({', '.join(notes)})")
        figure.savefig(path, dpi=110)
    return path


def _draw_tier(axes: Any, plan: Plan, tier: Tier) -> set[str]:
    """Draw one tier, and return the kinds of bytes in it."""
    capacity = getattr(plan.hardware, f"{tier}_bytes")
    axes.spines[["top", "right"]].set_visible(False)
    if capacity <= 1:
        axes.set_title(f"{_TITLES[tier]}: none", fontsize=12)
        axes.spines["bottom"].set_visible(False)
        axes.set_xticks([])
        return set()
    kinds = set()
    for position, row in enumerate(plan.entries):
        left, total = 0.0, sum(row.by_kind(tier).values())
        alpha = 0.3 if any(shortfall.tier == tier for shortfall in row.shortfalls) else 1.0
        if plan.recommends(row):
            axes.axhspan(position - 0.5, position + 0.5, color="#eef2f7", zorder=0)
        for kind, nbytes in row.by_kind(tier).items():
            width = min(nbytes / capacity, max(_LONGEST - left, 0.0))
            axes.barh(position, width, left=left, color=COLORS[kind], alpha=alpha)
            left += width
            if width:
                kinds.add(kind)
        if total:
            text = axes.text(left + 0.02, position, _bytes_text(total), va="center", fontsize=11)
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})  # over the limit's line
    axes.axvline(1.0, color=LIMIT, linestyle="--")
    axes.set_xlim(0, _LONGEST + 0.45)
    axes.set_xticks([0, 0.5, 1.0], ["0", "50%", "100%"])
    axes.set_title(f"{_TITLES[tier]}: {_bytes_text(capacity)}", fontsize=12)
    return kinds


def _bytes_text(nbytes: float) -> str:
    size, unit = next(each for each in _UNITS if nbytes >= each[0] or each[0] == 1.0)
    return f"{nbytes / size:,.3g} {unit}"
