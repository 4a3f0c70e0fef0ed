"""The protocol of optimizers that work on flat shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from zero_ext.config import Tier
from zero_ext.offload import OptimizerStateStorage, ShardStorage, Values
from zero_ext.optim.steppers.non_finite_flag import NonFiniteFlag


@dataclass(frozen=True)
class Segment:
    """One parameter's elements inside a range of a unit's flat buffer; possibly none of them."""

    name: str  # the parameter's full name
    start: int  # first element, counted in the parameter's memory order
    begin: int  # the same element, counted from the start of the range
    numel: int
    group: int = -1  # index of its param group, -1 outside an optimizer

    @property
    def end(self) -> int:
        """The element after the last one, counted from the start of the range."""
        return self.begin + self.numel


@dataclass(eq=False)
class OwnedRange:
    """The part of a unit that a rank's optimizer owns: state [n] that begins as fp32 master weights, the
    parameters [n] that a step writes or None where it writes none, and the segments that it steps.
    """

    state: OptimizerStateStorage
    output: ShardStorage | None
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True)
class Update:
    """A range to be stepped and its gradient [n], where it is stored."""

    index: int
    gradient: ShardStorage


# The sum over all ranks of int64 values in host memory that the given call finds on each; a collective that
# fails on all of them if the call fails on one. What all ranks hold alike counts once.
Total = Callable[[Callable[[], torch.Tensor]], torch.Tensor]


class Stepper(Protocol):
    """Updates owned ranges. `index` counts the ranges given at construction.

    `reads_scale_on_device` says that `step` takes a `scale` in the device's memory, and changes
    nothing but its scalars where that is not finite. Else `scale` is finite and in host memory.
    """

    @property
    def reads_scale_on_device(self) -> bool:
        """See above."""

    def step(self, updates: Sequence[Update], scale: torch.Tensor, used: frozenset[str]) -> Iterator[int]:
        """One optimizer step on some ranges: gradients times `scale` (0-d float32), for the parameters
        named in `used` only; the others keep value and state, as torch's do without a gradient.

        Yields the index of a range as soon as its parameters are in place.
        """

    def watch(self, flag: NonFiniteFlag) -> None:
        """Raise `flag` from now on in every step that makes a master weight or moment NaN or infinite."""

    def snapshot(self, index: int) -> None:
        """Keep what a step on one range changes, so that it can be rolled back.

        Parameters that follow the master weights are left out. Every such step ends by `commit` or
        `rollback`.
        """

    def commit(self, index: int) -> None:
        """Accept the step on a range since `snapshot`. Do nothing if there is none."""

    def rollback(self, index: int) -> None:
        """Restore state and scalars of a range as they were at `snapshot`, bit for bit."""

    def values(self, index: int) -> Iterator[tuple[str, Segment, Values]]:
        """State of a range besides the master weights, by segment: torch's name for it, segment, its values
        where they are stored."""

    def scalars(self) -> dict[str, Any]:
        """JSON-able per-parameter state, equal on all ranks."""

    def load_scalars(self, state: dict[str, Any]) -> None:
        """Restore `scalars`."""

    def make_state(self, kinds: Mapping[str, tuple[str, ...]]) -> Callable[[], None]:
        """Make state tensors exist that are created late, for the kinds named for each parameter, as far as
        this optimizer has such a kind. Returns what undoes it."""

    def state_bytes(self) -> Mapping[Tier, int]:
        """Return bytes of memory of the state that this stepper keeps besides the ranges' own, by their
        tier.
        """
