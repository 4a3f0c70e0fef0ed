"""Offsets in the pool for each demand, so that demands that overlap in time never overlap in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from zero_ext.config.buffer_sizes import extent_bytes

# What a unit uses memory for: its full parameters, the payload in which quantized ones are gathered, its
# unreduced gradient, and during the reduction the shard that is copied to another tier ("staging"), the data
# sent, in the communication dtype or quantized, and the data received from other ranks.
# Chunks of gradients on NVMe that others are added to belong to no unit.
Purpose = Literal["parameters", "payload", "gradient", "staging", "sent", "received", "chunks"]
Key = tuple[str, Purpose]  # the unit's name, or an empty one


@dataclass(frozen=True)
class Demand:
    """``count`` times ``nbytes`` that ``key`` needs, in the periods ``when``: first moment and the one after
    the last."""

    key: Key
    nbytes: int
    when: tuple[tuple[int, int], ...]
    count: int = 1

    @property
    def extent(self) -> int:
        """Bytes of all of it in whole pages."""
        return self.count * extent_bytes(self.nbytes)

    def meets(self, other: Demand) -> bool:
        """Return whether both are needed at some moment."""
        return bool(self._moments & other._moments)

    @cached_property
    def _moments(self) -> int:
        """A bit for each moment."""
        return sum((1 << end) - (1 << begin) for begin, end in self.when)


@dataclass(frozen=True)
class PoolPlan:
    """Bytes of the pool, and the offsets of each demand in it: one for each of its ``count``."""

    nbytes: int
    offsets: Mapping[Key, range]


def plan_pool(demands: Sequence[Demand]) -> PoolPlan:
    """Plan offsets such that demands that overlap in time do not overlap in memory.

    The layout of least memory is NP-hard. Three orders are tried, and each demand gets the lowest free
    offset: by size, by size times duration, and by time, the last also with equal slots. The smallest pool is
    returned.
    """
    slot = max((demand.extent for demand in demands), default=0)
    orders: tuple[tuple[Callable[[Demand], Any], int], ...] = (
        (lambda demand: (-demand.extent, demand.when), 0),
        (lambda demand: -demand.extent * sum(end - begin for begin, end in demand.when), 0),
        (lambda demand: demand.when, 0),
        (lambda demand: demand.when, slot),
    )
    plans = [_laid_out(sorted(demands, key=order), size) for order, size in orders]
    return min(plans, key=lambda plan: plan.nbytes)


def _laid_out(demands: Sequence[Demand], slot: int) -> PoolPlan:
    """Lay out the demands one after another in slots of at least ``slot`` bytes."""
    placed: list[tuple[int, int, Demand]] = []  # begin, end
    for demand in demands:
        offset, size = 0, max(demand.extent, slot)
        met = [(begin, end) for begin, end, other in placed if demand.meets(other)]
        for begin, end in sorted(met):
            if offset + size <= begin:
                break
            offset = max(offset, end)
        placed.append((offset, offset + size, demand))
    offsets = {
        demand.key: range(begin, begin + demand.extent, extent_bytes(demand.nbytes))
        for begin, _, demand in placed
    }
    return PoolPlan(max((begin + demand.extent for begin, _, demand in placed), default=0), offsets)
