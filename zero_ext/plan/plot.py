"""A plan as a picture: a stacked bar for every placement and tier, against what there is of the tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zero_ext.config import Tier
from zero_ext.plan.plan_entry import KINDS, TIERS, PlanEntry
from zero_ext.plan.planner import Plan

COLOURS = {
    "params": "#4c72b0",
    "grads": "#dd8452",
    "optimizer": "#55a868",
    "activations": "#8172b3",
    "buffers": "#b0b0b0",
    "autograd": "#da8bc3",
    "NCCL": "#937860",
}
_TITLES = {"device": "memory of a GPU", "host": "memory of a host", "nvme": "NVMe of a host"}
_MOST_SHOWN = 1.6  # times the capacity; longer bars are cut, with their figure beside them


def plot_plan(plan: Plan, path: Path) -> Path:
    """Draws ``plan`` to ``path`` (PNG, SVG or PDF by its suffix); bars of what does not fit are pale.

    ModuleNotFoundError where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "--plot: expected matplotlib, which is not installed. Install it with pip install matplotlib."
        ) from None
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(13, 0.42 * len(plan.entries) + 1.9), layout="constrained")
        panels = figure.subplots(1, len(TIERS), sharey=True)
        for axes, tier in zip(panels, TIERS, strict=True):
            _draw_tier(axes, plan, tier)
        panels[0].set_yticks(range(len(plan.entries)), [_label(plan, row) for row in plan.entries])
        panels[0].invert_yaxis()
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.suptitle(
            f"{plan.model.name} on {plan.gpus} GPUs, {plan.hardware.name}\n"
            f"→ recommended; pale: does not fit; bars end at {_MOST_SHOWN:g} times what there is"
        )
        figure.savefig(path, dpi=130)
    return path


def _label(plan: Plan, row: PlanEntry) -> str:
    chosen = plan.recommendation is not None and plan.recommendation.entry is row
    return f"{'→ ' if chosen else ''}{row.candidate}"


def _draw_tier(axes: Any, plan: Plan, tier: Tier) -> None:
    capacity = getattr(plan.hardware, f"{tier}_bytes")
    if capacity <= 1:  # there is none
        axes.set_title(f"{_TITLES[tier]}: none", fontsize=10)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.set_xticks([])
        return
    scale, unit = _unit(capacity)
    longest = _MOST_SHOWN * capacity / scale
    for position, row in enumerate(plan.entries):
        left, short = 0.0, {shortfall.tier for shortfall in row.shortfalls}
        for kind, nbytes in row.by_kind(tier).items():
            width = min(nbytes / scale, max(longest - left, 0.0))
            axes.barh(position, width, left=left, color=COLOURS[kind], alpha=0.35 if tier in short else 1.0)
            left += width
        total = sum(row.by_kind(tier).values()) / scale
        if total > 0:
            axes.text(
                left,
                position,
                f" {total:,.3g}" if total < 1000 else f" {total:,.0f}",
                va="center",
                fontsize=8,
            )
    for kind in KINDS:
        axes.barh(0, 0, color=COLOURS[kind], label=kind)
    axes.axvline(capacity / scale, color="#c44e52", linestyle="--", label="capacity")
    axes.set_xlim(0, longest * 1.18)
    axes.set_xlabel(unit)
    axes.set_title(f"{_TITLES[tier]}: {capacity / scale:,.4g} {unit}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _unit(capacity: int) -> tuple[float, str]:
    return next(
        ((scale, unit) for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")) if capacity >= 2 * scale),
        (1.0, "bytes"),
    )
