"""The sizes of pools of equal slots for the same demands, against exact extents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zero_ext.zero.memory.pool_plan import Demand


def slot_pool_bytes(demands: Sequence[Demand], classes: int) -> int:
    """Return the bytes of a pool of slots with at most `classes` sizes, chosen for the smallest pool.

    A slot is as large as the largest demand of its class, and a class has as many slots as it has demands at
    its busiest moment. One class is the pool of largest slots that ZeRO-Infinity implementations keep.

    Source: Rajbhandari et al., "ZeRO-Infinity" (arXiv 2104.07857), section 6.2.

    Args:
        demands: bytes and lifetimes of buffers.
        classes: number of sizes.

    Returns:
        Bytes.
    """
    ordered = sorted(demands, key=lambda demand: demand.nbytes)
    sizes = sorted({demand.nbytes for demand in ordered})
    # best[k] for a number of sizes: the smallest pool of at most k classes that holds the demands of these.
    best = [[0] * (classes + 1)]
    for stop in range(1, len(sizes) + 1):
        best.append(
            [0]
            + [
                min(
                    best[start][used - 1] + sizes[stop - 1] * _busiest(ordered, sizes[start], sizes[stop - 1])
                    for start in range(stop)
                    if used > 1 or start == 0
                )
                for used in range(1, classes + 1)
            ]
        )
    return best[-1][-1]


def _busiest(demands: Sequence[Demand], least: int, most: int) -> int:
    """Return the most demands of sizes from ``least`` to ``most`` bytes at one moment."""
    events = sorted(
        event
        for demand in demands
        if least <= demand.nbytes <= most
        for begin, end in demand.when
        for event in ((begin, demand.count), (end, -demand.count))
    )
    live = busiest = 0
    for _, change in events:
        live += change
        busiest = max(busiest, live)
    return busiest
