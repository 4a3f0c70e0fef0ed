"""Schedules of optimizer updates: when owned ranges are updated and parameters are sent to all ranks."""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zero_ext.comm import Collectives
from zero_ext.config.tiers import Tier, is_stored
from zero_ext.optim import Stepper, Update
from zero_ext.optim.stepper import NonFiniteFlag
from zero_ext.zero.gradients.accumulator import UnitGradients
from zero_ext.zero.step.stepped_experts import SteppedExperts
from zero_ext.zero.units.collective_errors import raise_on_all_ranks
from zero_ext.zero.units.flat_layout import FlatLayout
from zero_ext.zero.units.master_weights import MasterShard
from zero_ext.zero.units.unit import Unit

MIXTURE = (
    "State and parameters are now a mixture of before and after it. Load the last checkpoint before going on."
)


class Ownership(enum.Enum):
    """The elements of a unit with auxiliary state that a rank owns, in float32."""

    OWN = "own"  # all elements, different on every rank
    SHARD = "shard"  # the elements of its shard
    SHARED = "shared"  # all elements, equal on all ranks


class AuxiliaryState(NamedTuple):
    """Auxiliary state: values of a unit's elements from ``begin`` on. ``number`` is that of the unit's master
    shard."""

    kind: str
    number: int
    begin: int
    values: torch.Tensor
    ownership: Ownership

    def by_parameter(self, layout: FlatLayout) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Yield each parameter's name, its first element in memory order, and its values."""
        for segment in layout.segments(self.begin, self.begin + self.values.numel()):
            yield segment.name, segment.start, self.values[segment.begin : segment.end]


class UpdateSchedule:
    """Decides when the updates of a step run. The engine calls the methods on every schedule.

    These do nothing, and :meth:`used_parameters` and :meth:`run` raise that there is no optimizer, for models
    prepared without one.
    """

    pending = False  # updates may have been made that ``optimizer.step()`` has not finished
    clears = False  # a step forgets its gradients
    rolled_back = False  # the last step rolled updates back
    in_progress = False  # parameters still have to follow updates of a step that has ended
    # ``run`` changes nothing if the scale is not finite, and the host never reads it outside the stepper.
    obeys_scale = False
    broke_off = False  # an update failed that other ranks take part in: state is a mixture
    # Raised by the stepper for results that are not finite, lowered by rollbacks; None if nobody checks.
    flag: NonFiniteFlag | None = None
    committed_steps = 0  # steps with right trial updates
    rolled_back_steps = 0  # steps with wrong ones

    @property
    def needs_local_gradients(self) -> bool:
        """Return whether the next step wants gradients as they are on each rank, unreduced."""
        return False

    @property
    def updated(self) -> bool:
        """Return whether units were updated in backward and cannot be rolled back."""
        return False

    @property
    def drifts(self) -> bool:
        """Return whether the ranks' parameters differ, until a later step."""
        return False

    def refuse_pending(self, what: str) -> None:
        """Raise ``RuntimeError`` between a backward pass that makes updates and its step."""

    def refuse_local(self, what: str) -> None:
        """Raise ``RuntimeError`` where the next step needs local gradients: averages do not exist."""

    def refuse_drift(self, what: str) -> None:
        """Raise ``RuntimeError`` while the parameters differ between the ranks."""

    def begin_backward(self, last: bool, scale: torch.Tensor) -> None:
        """Begin a backward pass; ``last`` says that it is the last of its step, ``scale`` (0-d float32) what
        gradients are multiplied with unless they are clipped. Raises ``RuntimeError`` to refuse the pass."""

    def gradient_arrived(self, gradients: UnitGradients) -> None:
        """Handle a new gradient of this unit."""

    def reduced(self, gradients: UnitGradients, finite: bool) -> None:
        """Handle a finished reduction of this unit. Gradients that are not ``finite`` start no update."""

    def read(self, gradients: UnitGradients, index: int) -> None:
        """Backward runs code of the model again that reads parameter ``index`` of this unit."""

    def read_settings(self) -> None:
        """Let the stepper read its settings for the next :meth:`run`, the same on all ranks. Raise
        ``ValueError`` for what it refuses."""

    def used_parameters(self) -> frozenset[str]:
        """Return the names of the parameters that have a gradient. Raise ``RuntimeError`` if none has."""
        raise _no_optimizer()

    def run(self, scale: torch.Tensor, used: frozenset[str]) -> None:
        """``optimizer.step()`` has settled the gradients: their factor (0-d float32) and the names of the
        parameters that have one on any rank. A collective; :class:`CollectiveError` on all ranks if it failed
        on some and left a mixture."""
        raise _no_optimizer()

    def begin_delayed(self) -> None:
        """Note that the step is counted: updates alongside the next forward and backward may start."""

    def wait(self) -> None:
        """Return when no update runs any more, the parameters as they are; raise what made it fail here."""

    def finish(self) -> None:
        """Return when the parameters have followed all updates, on all ranks. A collective;
        :class:`CollectiveError` as of :meth:`run`."""

    def allocated_bytes(self) -> Mapping[Tier, int]:
        """Return bytes by tier that hold gradients for updates, besides the units' own."""
        return {}

    def rollback(self) -> None:
        """Restore state and parameters from before backward, because the step is skipped. A collective."""

    def forget(self) -> str | None:
        """Note that the gradients are cleared; return what that damages, if anything."""
        return None

    def abandon(self) -> str | None:
        """Note that a backward pass broke off; return what is damaged by it, if anything is."""
        return None

    def drop(self) -> None:
        """State and parameters were replaced, as by a checkpoint."""

    def not_finite(self) -> list[int]:
        """With unreduced gradients: the ranks that have one which is not finite. A collective."""
        return []

    def auxiliary_state(self) -> Iterator[AuxiliaryState]:
        """Yield the auxiliary state that checkpoints store."""
        return iter(())

    def prepare_auxiliary_state(self, kinds: Mapping[str, tuple[str, ...]]) -> Callable[[], None]:
        """Create the state of a checkpoint with ``kinds`` per parameter; return a function that undoes it."""
        return lambda: None

    def leaves(self, kind: str) -> bool:
        """Return whether state of this kind in the checkpoint is left aside."""
        return False

    def restore(self) -> None:
        """Update parameters after a load, where they differ from their rounded masters."""


class UpdateInputs(NamedTuple):
    """Inputs of updates. Masters and gradients of the same number belong to one unit."""

    stepper: Stepper
    masters: Sequence[MasterShard]
    gradients: Sequence[UnitGradients]
    collectives: Collectives
    experts: SteppedExperts


class UpdatesAfterBackward(UpdateSchedule):
    """All updates of a step run inside ``optimizer.step()``, from the gradients of all units."""

    obeys_scale = True

    def __init__(self, inputs: UpdateInputs) -> None:
        self._stepper, self._masters, self._gradients, self._collectives, self._experts = inputs

    def read_settings(self) -> None:
        self._stepper.read_settings()

    def used_parameters(self) -> frozenset[str]:
        owned = [(each.unit.layout.specs, each.contributed) for each in self._gradients]
        used = frozenset(specs[number].name for specs, numbers in owned for number in numbers)
        if not used:
            raise RuntimeError(
                "optimizer.step(): expected a gradient, got none for any parameter of this model since the "
                "last zero_grad(). Call loss.backward() on a loss that depends on the model."
            )
        return used

    def run(self, scale: torch.Tensor, used: frozenset[str]) -> None:
        """Make all updates. With state on NVMe all ranks agree before anything is published."""
        publishing: Iterable[Unit]
        if any_stored(self._masters, self._gradients):
            publishing = raise_on_all_ranks(
                self._collectives, lambda: list(self._step(scale, used)), "the optimizer step", MIXTURE
            )
        else:
            publishing = self._step(scale, used)
        publish(publishing)

    def _step(self, scale: torch.Tensor, used: frozenset[str]) -> Iterator[Unit]:
        updates = self._updates()
        try:
            for number in self._stepper.step(updates, scale, used):
                yield self._masters[number].unit
        except Exception:
            self.broke_off = any(self._stepper.is_collective(update.index) for update in updates)
            raise

    def _updates(self, done: Container[int] = ()) -> list[Update]:
        return [
            self._update_of(number, gradients)
            for number, gradients in enumerate(self._gradients)
            if gradients.contributed and number not in done
        ]

    def _update_of(self, number: int, gradients: UnitGradients) -> Update:
        ranges = self._experts.ranges_in(self._masters[number], gradients.assigned)
        return Update(number, gradients.for_optimizer(), ranges)


def _no_optimizer() -> RuntimeError:
    return RuntimeError(
        "prepared model: expected one with an optimizer, got one without. Pass an optimizer "
        "to zero_ext.prepare."
    )


def any_stored(masters: Sequence[MasterShard], gradients: Sequence[UnitGradients]) -> bool:
    """Return whether a step of ``masters`` with their ``gradients`` uses storage."""
    return any(
        is_stored(master.state.tier, master.unit.storage.tier, own.storage.tier)
        for master, own in zip(masters, gradients, strict=True)
    )


def settings_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the param groups' settings as they are now, as groups without parameters."""
    return [
        {
            # Schedulers write to settings that are tensors in place.
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in {**group, "params": []}.items()
        }
        for group in groups
    ]


def publish(units: Iterable[Unit]) -> None:
    """Send the parameters of ``units`` that other ranks need; a collective, alike on all ranks."""
    # All gathers start before the first is waited for. ``units`` may be a generator
    # that makes the updates, so a gather overlaps with the updates after it.
    for pending in [unit.start_publishing() for unit in units]:
        if pending is not None:
            pending.wait()
