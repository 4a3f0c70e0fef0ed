"""The interface of a unit to the prefetcher: its sizes, its state and the transitions between states."""

from __future__ import annotations

import enum
from typing import Protocol

from zero_ext.zero.memory.unit_spec import UnitSpec


class UnitState(enum.Enum):
    """The life of a unit's full parameters."""

    RELEASED = "released"  # only the shard exists; every parameter is a placeholder
    FETCHING = "fetching"  # a pool buffer is attached and the shard is being copied into it
    GATHERING = "gathering"  # the all-gather is running
    GATHERED = "gathered"  # the parameters are views of the full flat buffer


class GatheredUnit(Protocol):
    """A unit of the engine, or one with sizes only, which plans and simulations use.

    Attributes:
        spec: Its sizes and placement.
        state: Where its full parameters are in their life.
        holders: The running calls that need it; it may be released when there is none.
        exact: Whether the gathered values are the shards themselves, not quantized ones.
    """

    spec: UnitSpec
    state: UnitState
    holders: set[object]
    exact: bool

    @property
    def is_aside(self) -> bool:
        """Return whether :meth:`set_aside` stores the values."""

    @property
    def needs_early_gather(self) -> bool:
        """Return whether a gather or a copy to an accelerator follows the fetch, and should start
        before use.
        """

    def to_fetching(self, exact: bool = False) -> None:
        """Attach a buffer and start to fetch the shard into it. From RELEASED only."""

    def to_gathering(self) -> None:
        """Start the all-gather as soon as the shard is fetched. From FETCHING only."""

    def to_gathered(self) -> None:
        """Wait for the gather and make the parameters views. From GATHERING only."""

    def set_aside(self) -> None:
        """Store the full values for :meth:`to_gathered`. From GATHERED only, with nothing written."""

    def to_released(self) -> None:
        """Drop the full parameters. From any other state, without holders."""

    def invalidate(self) -> None:
        """Drop what nodes keep of others' shards, before shards change."""

    def written(self) -> list[int]:
        """Return the indices of parameters that were written in place since the last check."""

    def describe(self) -> str:
        """Return name and parameters, for errors."""
