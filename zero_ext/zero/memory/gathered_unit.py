"""A unit as plans and the prefetcher see it: sizes and placement, states, and transitions between these."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from zero_ext.config.buffer_sizes import payload_bytes
from zero_ext.config.communication import CODE_BITS, CodeDtype
from zero_ext.config.offload import StatePlacement

# The experts of a mixture that are gathered. None: all of them.
ExpertSelection = frozenset[int] | None


@dataclass(frozen=True, eq=False)
class UnitSpec:
    """Sizes and placement of a unit, and when a step uses it, before the unit exists.

    Parameters are numbered in the order of registration.
    """

    name: str
    numel: int  # elements, padding included
    itemsize: int  # bytes of an element
    world_size: int  # ranks that share it, and so shards
    placement: StatePlacement
    gathered: tuple[int, int]  # first and last parameter of the module that needs it, meanwhile gathered
    grads_start: int  # parameter from which on its gradients are computed in backward
    grads_end: tuple[int, int] | None  # first and last parameter where its last gradient may be computed
    replicas: int = 1  # groups of ranks that each have all shards
    is_float: bool = True  # only such units are gathered in quantized form
    rereads: bool = True  # whether backward gathers it again
    shared_bytes: int = 0  # of parameters that several modules share
    largest_bytes: int = 0  # of its largest parameter
    persistent: bool = False  # whether its parameters stay gathered because they are small
    # Its first one. It is -1 for persistent units and for sharded ones outside blocks: the model's own, and
    # those of several modules.
    first_parameter: int = -1
    rule: str = ""  # how the optimizer steps it, where it steps parameters in several ways
    experts: int = 0  # number of experts that are gathered one by one. 0: all parameters are gathered
    stacked: frozenset[str] = frozenset()  # the parameters with a slice for each of the experts

    @property
    def trained(self) -> bool:
        """Return whether it has master weights and gradients."""
        return self.grads_end is not None

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard."""
        return self.numel // self.world_size

    @property
    def owned_numel(self) -> int:
        """Elements with optimizer state on one rank."""
        return self.shard_numel if self.placement.optimizer else self.numel

    @property
    def nbytes(self) -> int:
        """Bytes of the full flat buffer."""
        return self.numel * self.itemsize

    def payload_bytes(self, codes: CodeDtype) -> int:
        """Return the bytes of all shards quantized to ``codes``."""
        return self.world_size * payload_bytes(self.shard_numel, CODE_BITS[codes])


class UnitState(enum.Enum):
    """The life of a unit's full parameters."""

    RELEASED = "released"  # only the shard exists; every parameter is a placeholder
    FETCHING = "fetching"  # a pool buffer is attached and the shard is being copied into it
    GATHERING = "gathering"  # the all-gather is running
    GATHERED = "gathered"  # the parameters are views of the full flat buffer


class GatheredUnit(Protocol):
    """A unit of the engine, or one with sizes only, which plans and simulations use."""

    spec: UnitSpec
    state: UnitState
    holders: set[object]  # running calls that need it; without any it may be released
    exact: bool  # whether the gathered values are the shards themselves, not quantized ones

    @property
    def is_aside(self) -> bool:
        """Return whether :meth:`set_aside` stores the values."""

    @property
    def needs_early_gather(self) -> bool:
        """Return whether a gather or a copy to an accelerator follows the fetch, and should start
        before use."""

    def to_fetching(self, exact: bool = False, experts: ExpertSelection = None) -> None:
        """Attach a buffer and start to fetch the shard into it, of the selected ``experts`` and what all of
        them share. From RELEASED only."""

    def to_gathering(self) -> None:
        """Start the all-gather as soon as the shard is fetched. From FETCHING only."""

    def to_gathered(self) -> None:
        """Wait for the gather and make the parameters views. From GATHERING only."""

    def cover(self, experts: ExpertSelection) -> None:
        """Gather those of ``experts`` that are missing. From GATHERED only."""

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
