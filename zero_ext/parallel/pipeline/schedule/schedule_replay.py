"""A pipeline's step again with other durations: what its order of slots costs where slots take so long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from zero_ext.parallel.pipeline.schedule.pipeline_timeline import Slot

Seconds = Callable[[Slot], float]


def replay(
    ranks: Sequence[Sequence[Slot]], seconds: Seconds, exchange_seconds: float = 0.0
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
    last = max(slot.stage for slots in ranks for slot in slots)
    holders = {slot.stage: rank for rank, slots in enumerate(ranks) for slot in slots}
    ended: dict[tuple[str, int, int], float] = {}
    done: list[list[Slot]] = [[] for _ in ranks]
    moved = True
    while moved:
        moved = False
        for rank, slots in enumerate(ranks):
            while len(done[rank]) < len(slots):
                slot = slots[len(done[rank])]
                needed = _needed(slot, last)
                if any(key not in ended for key in needed):
                    break
                after = [ended[key] + exchange_seconds * (holders[key[1]] != rank) for key in needed]
                own = done[rank][-1] if done[rank] else None
                began = max([own.began + own.seconds if own else 0.0, *after])
                placed = replace(slot, began=began, seconds=seconds(slot))
                done[rank].append(placed)
                ended[slot.what, slot.stage, slot.micro_batch] = began + placed.seconds
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
    slots = [slot for each in ranks for slot in each]
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
    for slots in ranks:
        for slot in slots:
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
