"""The memory timeline as a plot."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from zero_ext.config import plot_colors
from zero_ext.monitor.sources.memory_timeline import MemorySample, MemoryTimeline
from zero_ext.zero.step.memory_breakdown import KINDS

_COLORS = {**plot_colors.KINDS, "staging": plot_colors.GRAY}
_PHASES = {"forward": "#dde6f5", "backward": "#f7ead0", "step": "#dff0ea"}
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def draw(timeline: MemoryTimeline, phases: Sequence[dict[str, Any]]) -> bytes:
    """Return a PNG: a panel for each tier that holds anything, stacked by kind, one for gathered units, one
    for the process; phases, spans of a Chrome trace, in the background.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    first = min([span["ts"] * 1e-6 for span in phases] + [each.seconds for each in timeline.samples])
    panels = [tier for tier in ("device", "host", "nvme") if _held(timeline, tier)]
    if timeline.live:
        panels.append("gathered")
    panels.append("process")
    figure = Figure(figsize=(8, 1.0 + 1.3 * len(panels)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        for span in phases:
            begin = span["ts"] * 1e-6 - first
            axis.axvspan(begin, begin + span["dur"] * 1e-6, color=_PHASES[span["name"]], lw=0, zorder=0)
        _panel(axis, timeline, panel, first)
    axes[0].set_title(f"memory of rank {timeline.rank}", loc="left", fontsize=10)
    axes[-1].set_xlabel("seconds")
    handles, labels = axes[0].get_legend_handles_labels()
    from matplotlib.patches import Patch

    handles += [Patch(color=color) for color in _PHASES.values()]
    figure.legend(
        handles, [*labels, *_PHASES], loc="outside lower center", ncols=7, fontsize=8, frameon=False
    )
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _held(timeline: MemoryTimeline, tier: str) -> int:
    return max((sum(_kinds(each, tier).values()) for each in timeline.samples), default=0)


def _kinds(sample: MemorySample, tier: str) -> dict[str, int]:
    return next(kinds for name, kinds in sample.held.items() if name == tier)


def _panel(axis: Any, timeline: MemoryTimeline, panel: str, first: float) -> None:
    times = [each.seconds - first for each in timeline.samples]
    if panel == "gathered":
        moments = [seconds - first for seconds, _ in timeline.live]
        rows = [[nbytes for _, nbytes in timeline.live]]
        names, colors = ["gathered units"], [plot_colors.PINK]
    elif panel == "process":
        moments, rows = times, [[each.process for each in timeline.samples]]
        names, colors = ["resident"], [plot_colors.SKY]
    else:
        moments = times
        rows = [[_kinds(each, panel)[kind] for each in timeline.samples] for kind in KINDS]
        names, colors = list(KINDS), [_COLORS[kind] for kind in KINDS]
    most = max((sum(column) for column in zip(*rows, strict=True)), default=0)
    size, unit = next(each for each in _UNITS if most >= each[0] or each[0] == 1)
    scaled = [[value / size for value in row] for row in rows]
    axis.stackplot(moments, scaled, labels=names, colors=colors, alpha=0.9, step="post", lw=0)
    axis.set_ylabel(f"{panel}\n{unit}", fontsize=8)
    axis.set_ylim(0, max(most / size * 1.15, 1e-9))
    axis.tick_params(labelsize=8)
