"""The layers of each pipeline stage: neighboring ones, so that the heaviest stage is as light as can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def split_stages(weights: Sequence[float], stages: int) -> list[range]:
    """Divide layers into stages of consecutive ones, so that the heaviest stage is as light as possible.

    Exact, by dynamic programming over the cuts. Where several are as good, smaller squares of the sums count,
    so that the lighter stages are even too.

    Args:
        weights: cost of each layer: 1 each, its parameters, its seconds.
        stages: number of stages.

    Returns:
        The layers of each stage, none empty.

    Raises:
        ValueError: fewer layers than stages, less than one stage, or a weight that is negative or not finite.

    Examples:
        >>> from zero_ext.parallel import split_stages
        >>> split_stages([4, 1, 1, 1, 1], stages=2)
        [range(0, 1), range(1, 5)]
    """
    layers = len(weights)
    if stages < 1:
        raise ValueError(f"pipeline stages: expected at least 1, got {stages}. Use 1 or more.")
    if layers < stages:
        raise ValueError(
            f"pipeline stages: expected at most {layers}, as each needs one of {layers} layers, got "
            f"{stages}. Use fewer stages, or split the model into more layers."
        )
    for number, weight in enumerate(weights):
        if not 0 <= weight < float("inf"):
            raise ValueError(
                f"weight of layer {number}: expected a finite number of at least 0, got {weight}. Correct it."
            )
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # best[count]: the largest sum and the sum of squares of the first ``count`` layers in the stages so far.
    best = [(sums[count], sums[count] ** 2) if count else None for count in range(layers + 1)]
    cuts: list[list[int]] = []
    for stage in range(1, stages):
        best, chosen = _one_more_stage(best, sums, stage)
        cuts.append(chosen)
    ends = [layers]
    for chosen in reversed(cuts):
        ends.append(chosen[ends[-1]])
    ends.append(0)
    ends.reverse()
    return [range(begin, end) for begin, end in pairwise(ends)]


_Cost = tuple[float, float]


def _one_more_stage(
    best: Sequence[_Cost | None], sums: Sequence[float], stage: int
) -> tuple[list[_Cost | None], list[int]]:
    """Return the costs with one stage more, and where that stage begins for each number of layers."""
    found: list[_Cost | None] = [None] * len(best)
    begins = [0] * len(best)
    for count in range(stage + 1, len(best)):
        for begin in range(count - 1, stage - 1, -1):
            before, own = best[begin], sums[count] - sums[begin]
            known = found[count]
            if known is not None and own > known[0]:
                break  # it only grows from here
            if before is None:
                continue
            cost = (max(before[0], own), before[1] + own**2)
            if known is None or cost < known:
                found[count], begins[count] = cost, begin
    return found, begins
