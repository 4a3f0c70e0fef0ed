"""The memory of a rank over time, by tier and kind, of gathered units, and of the process; and its plot."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from zero_ext.config import plot_colors
from zero_ext.config.tiers import TIERS, Tier
from zero_ext.monitor.process_memory import resident_bytes
from zero_ext.zero.engine import Engine
from zero_ext.zero.step.memory_breakdown import KINDS

_COLORS = {**plot_colors.KINDS, "staging": plot_colors.GRAY}
_PHASES = {"forward": "#dde6f5", "backward": "#f7ead0", "step": "#dff0ea"}
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


@dataclass(frozen=True)
class MemorySample:
    """Bytes at ``seconds`` (of ``time.perf_counter``): the engine's memory breakdown by tier and kind, the
    process's resident set, and what torch's allocator has given out on an accelerator (None on a CPU).
    """

    seconds: float
    held: Mapping[Tier, dict[str, int]]
    process: int
    allocated: int | None


class MemoryTimeline:
    """Samples of one rank, in order of time; ``live`` holds seconds and bytes of gathered units at every
    gather and release."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.samples: list[MemorySample] = []
        self.live: list[tuple[float, int]] = []

    def sample(self, engine: Engine) -> None:
        """Take a sample, which waits for nothing; no delayed update may be running."""
        device = engine.device
        allocated = torch.accelerator.memory_allocated(device) if device.type != "cpu" else None
        held = engine.memory_by_tier(wait=False)
        self.samples.append(MemorySample(time.perf_counter(), held, resident_bytes(), allocated))

    def counters(self) -> list[dict[str, Any]]:
        """Return the timeline as counter events of a Chrome trace."""
        found = [self._counter("gathered", at, {"bytes": nbytes}) for at, nbytes in self.live]
        for sample in self.samples:
            for tier, kinds in sample.held.items():
                found.append(self._counter(f"memory {tier}", sample.seconds, kinds))
            process = {"resident": sample.process}
            if sample.allocated is not None:
                process["allocated on the device"] = sample.allocated
            found.append(self._counter("memory process", sample.seconds, process))
        return found

    def _counter(self, name: str, seconds: float, values: dict[str, int]) -> dict[str, Any]:
        return {"ph": "C", "name": name, "pid": self.rank, "ts": seconds * 1e6, "args": dict(values)}


class _Panel(NamedTuple):
    """Bytes at ``times``, a row for each of ``colors``, which are by label."""

    times: list[float]
    colors: dict[str, str]
    rows: list[list[int]]


def draw(timeline: MemoryTimeline, phases: Sequence[dict[str, Any]]) -> bytes:
    """Return a PNG: a panel for each tier that holds anything, stacked by kind, one for gathered units, one
    for the process; phases, spans of a Chrome trace, in the background.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    first = min([span["ts"] * 1e-6 for span in phases] + [each.seconds for each in timeline.samples])
    panels = _panels(timeline)
    figure = Figure(figsize=(8, 1.0 + 1.3 * len(panels)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, panel) in zip(axes, panels.items(), strict=True):
        for span in phases:
            begin = span["ts"] * 1e-6 - first
            axis.axvspan(begin, begin + span["dur"] * 1e-6, color=_PHASES[span["name"]], lw=0, zorder=0)
        most = max(map(sum, zip(*panel.rows, strict=True)), default=0)
        size, unit = next(each for each in _UNITS if most >= each[0] or each[0] == 1)
        times = [seconds - first for seconds in panel.times]
        scaled = [[value / size for value in row] for row in panel.rows]
        colors = list(panel.colors.values())
        axis.stackplot(times, scaled, labels=list(panel.colors), colors=colors, alpha=0.9, step="post", lw=0)
        axis.set_ylabel(f"{name}\n{unit}", fontsize=8)
        axis.set_ylim(0, max(most / size * 1.15, 1e-9))
        axis.tick_params(labelsize=8)
    axes[0].set_title(f"memory of rank {timeline.rank}", loc="left", fontsize=10)
    axes[-1].set_xlabel("seconds")
    handles, labels = axes[0].get_legend_handles_labels()
    handles += [Patch(color=color) for color in _PHASES.values()]
    labels += _PHASES
    figure.legend(handles, labels, loc="outside lower center", ncols=7, fontsize=8, frameon=False)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _panels(timeline: MemoryTimeline) -> dict[str, _Panel]:
    times = [each.seconds for each in timeline.samples]
    found: dict[str, _Panel] = {}
    for tier in TIERS:
        rows = [[each.held[tier][kind] for each in timeline.samples] for kind in KINDS]
        if any(map(any, rows)):
            found[tier] = _Panel(times, {kind: _COLORS[kind] for kind in KINDS}, rows)
    if timeline.live:
        moments, gathered = ([*column] for column in zip(*timeline.live, strict=True))
        found["gathered"] = _Panel(moments, {"gathered units": plot_colors.PINK}, [gathered])
    resident = [each.process for each in timeline.samples]
    found["process"] = _Panel(times, {"resident": plot_colors.SKY}, [resident])
    return found
