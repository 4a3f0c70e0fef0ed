"""The timeline of a pipeline's step on each rank: its plot, and the step again with other durations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
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

    began = min(slot.began for slot in chain(*ranks))
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
    drawn = {slot.what for slot in chain(*ranks)}
    shown = [Patch(color=color, label=what) for what, color in _COLORS.items() if what in drawn]
    axes.legend(handles=shown, fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def replay(
    ranks: Sequence[Sequence[Slot]], seconds: Callable[[Slot], float], exchange_seconds: float = 0.0
) -> list[list[Slot]]:
    """Return the slots of every rank as they would lie from 0 on with other durations.

    A forward waits for that of the stage before, a backward for that of the stage after and for its own
    forward, a weight gradient for its own backward.

    Args:
        ranks: all slots of a step in each rank's order, as `Pipeline.slots` of each rank.
        seconds: duration of a slot.
        exchange_seconds: time of a result to another rank.

    Returns:
        The new slots of each rank.

    Raises:
        ValueError: orders wait for one another, or a slot is missing.
    """
    holders = {slot.stage: rank for rank, slots in enumerate(ranks) for slot in slots}
    ended: dict[tuple[str, int, int], float] = {}
    done: list[list[Slot]] = [[] for _ in ranks]
    moved = True
    while moved:
        moved = False
        for rank, slots in enumerate(ranks):
            while len(done[rank]) < len(slots):
                slot = slots[len(done[rank])]
                needed = _needed(slot, max(holders))
                if any(key not in ended for key in needed):
                    break
                after = [ended[key] + exchange_seconds * (holders[key[1]] != rank) for key in needed]
                after += [each.began + each.seconds for each in done[rank][-1:]]
                done[rank].append(replace(slot, began=max(after, default=0.0), seconds=seconds(slot)))
                new = done[rank][-1]
                ended[slot.what, slot.stage, slot.micro_batch] = new.began + new.seconds
                moved = True
    for rank, slots in enumerate(ranks):
        if len(done[rank]) < len(slots):
            raise ValueError(
                f"rank {rank}: it waits forever at {slots[len(done[rank])]}. Pass the slots of all ranks of "
                "one step, in the order in which each rank ran them."
            )
    return done


def busy_fraction(ranks: Sequence[Sequence[Slot]]) -> float:
    """Return the fraction of the step, from its first slot to the end of its last, that ranks are busy.

    Args:
        ranks: all slots of a step.

    Returns:
        0 to 1.
    """
    slots = [*chain(*ranks)]
    span = max(slot.began + slot.seconds for slot in slots) - min(slot.began for slot in slots)
    return sum(slot.seconds for slot in slots) / (len(ranks) * span)


def bubble_bound(ranks: Sequence[Sequence[Slot]]) -> float:
    """Return the `busy_fraction` that the order of these slots allows.

    All slots of a kind take their average time, and results are sent in no time: m / (m + p - 1) in GPipe and
    1F1B, of p stages and m micro-batches.

    Source: Narayanan et al. (arXiv 2104.04473), section 2.2.

    Args:
        ranks: all slots of a step.

    Returns:
        0 to 1.
    """
    kinds: dict[str, list[float]] = {}
    for slot in chain(*ranks):
        kinds.setdefault(slot.what, []).append(slot.seconds)
    return busy_fraction(replay(ranks, lambda slot: sum(kinds[slot.what]) / len(kinds[slot.what])))


def _needed(slot: Slot, last: int) -> list[tuple[str, int, int]]:
    stage, micro_batch = slot.stage, slot.micro_batch
    if slot.what == "forward":
        return [("forward", stage - 1, micro_batch)] if stage else []
    if slot.what == "weights":
        return [("backward", stage, micro_batch)]
    after = [("backward", stage + 1, micro_batch)] if stage < last else []
    return [("forward", stage, micro_batch), *after]
