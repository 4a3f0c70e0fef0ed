"""The timeline of a pipeline's step on each rank, and its plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zero_ext.config.plot_colors import SERIES


@dataclass(frozen=True)
class Slot:
    """One task of a pipeline's stage.

    Attributes:
        what: "forward", "backward" or "weights" (weight gradients).
        stage: number of the stage.
        micro_batch: number of the micro-batch.
        began: start on the rank's own clock, in seconds.
        seconds: duration.
    """

    what: str
    stage: int
    micro_batch: int
    began: float
    seconds: float


_COLORS = dict(zip(("forward", "backward", "weights"), SERIES, strict=False))


def plot_timeline(ranks: Sequence[Sequence[Slot]], path: Path, title: str = "") -> Path:
    """Plot the slots of each rank of a pipeline, one row per rank, numbered by micro-batch.

    The ranks' clocks are taken for one, as they are on one machine.

    Args:
        ranks: slots of each rank.
        path: the image file.
        title: of the plot.

    Returns:
        `path`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    began = min(slot.began for slots in ranks for slot in slots)
    figure, axes = pyplot.subplots(figsize=(12.0, 1.0 + 0.6 * len(ranks)))
    for row, slots in enumerate(ranks):
        for slot in slots:
            start = 1e3 * (slot.began - began)
            axes.barh(
                row,
                1e3 * slot.seconds,
                left=start,
                color=_COLORS[slot.what],
                edgecolor="white",
                linewidth=0.5,
            )
            axes.text(
                start + 500 * slot.seconds, row, str(slot.micro_batch), ha="center", va="center", fontsize=7
            )
    axes.set_yticks(range(len(ranks)), [f"rank {row}" for row in range(len(ranks))])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title(title)
    drawn = {slot.what for slots in ranks for slot in slots}
    shown = [Patch(color=color, label=what) for what, color in _COLORS.items() if what in drawn]
    axes.legend(handles=shown, fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
