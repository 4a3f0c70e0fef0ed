"""When and how the owned ranges are updated, and the parameters sent to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zero_ext.comm import Collectives
from zero_ext.config import Tier
from zero_ext.optim import Stepper, Update
from zero_ext.optim.steppers.non_finite_flag import NonFiniteFlag
from zero_ext.zero.gradients.accumulator import UnitGradients
from zero_ext.zero.step.auxiliary_state import Kept
from zero_ext.zero.units.collective_errors import together
from zero_ext.zero.units.master_weights import MasterShard
from zero_ext.zero.units.unit import Unit

MIXTURE = (
    "State and parameters are now a mixture of before and after it; load the last checkpoint before going on."
)


class AfterBackward:
    """All updates of a step run inside ``optimizer.step()``, from the gradients of all units.

    The methods are what the engine tells whoever decides when updates run; here only :meth:`run` does
    something. ``pending`` says that updates may have been made which ``optimizer.step()`` has not finished,
    ``clears`` that a step forgets its gradients, ``taken_back`` that the last step took updates back,
    ``under_way`` that parameters are still to follow updates of a step that has ended.
    ``obeys_scale`` says that :meth:`run` changes nothing where the factor is not finite, whose value the host
    never needs, if the stepper does not either.
    ``flag`` is what the stepper raises where its results are not finite, None where nobody looks. Updates
    that are taken back lower it. ``kept_steps`` and ``taken_back_steps`` count the steps whose updates on
    trial were right and wrong.
    """

    pending = False
    clears = False
    taken_back = False
    under_way = False
    obeys_scale = True
    flag: NonFiniteFlag | None = None
    kept_steps = 0
    taken_back_steps = 0

    def __init__(
        self,
        stepper: Stepper,
        masters: Sequence[MasterShard],
        gradients: Mapping[Unit, UnitGradients],
        collectives: Collectives,
    ) -> None:
        self._stepper = stepper
        self._masters = tuple(masters)
        self._gradients = [gradients[master.unit] for master in masters]
        self._collectives = collectives

    @property
    def keeps_local(self) -> bool:
        """Whether the next step wants gradients as they are on each rank, unreduced."""
        return False

    @property
    def updated(self) -> bool:
        """Whether units were updated in backward and cannot be taken back."""
        return False

    @property
    def drifts(self) -> bool:
        """Whether the ranks' parameters differ, until a later step."""
        return False

    def begin_backward(self, last: bool, scale: torch.Tensor) -> None:
        """A backward pass begins; ``last`` says that it is the last of its step, ``scale`` (0-d float32) what
        gradients are multiplied with unless they are clipped. Raises ``RuntimeError`` to refuse the pass."""

    def came(self, gradients: UnitGradients) -> None:
        """A gradient of this unit arrives."""

    def reduced(self, gradients: UnitGradients) -> None:
        """A reduction of this unit is finished."""

    def read(self, gradients: UnitGradients, index: int) -> None:
        """Backward runs code of the model again that reads parameter ``index`` of this unit."""

    def run(self, scale: torch.Tensor, used: frozenset[str]) -> None:
        """``optimizer.step()`` has settled the gradients: their factor (0-d float32) and the names of the
        parameters that have one on any rank. A collective; :class:`FailedTogether` on all ranks if it failed
        on some and left a mixture.

        Where state lies in storage, which may fail on one rank alone, all ranks agree before anything is
        published.
        """
        publishing: Iterable[Unit]
        if any_stored(self._masters, self._gradients):
            publishing = together(
                self._collectives,
                lambda: list(self._step(scale, used)),
                "the optimizer step",
                MIXTURE,
            )
        else:
            publishing = self._step(scale, used)
        publish(publishing)

    def _step(self, scale: torch.Tensor, used: frozenset[str]) -> Iterator[Unit]:
        for number in self._stepper.step(self._updates(), scale, used):
            yield self._masters[number].unit

    def begin_delayed(self) -> None:
        """The step is counted: updates that run beside the next forward and backward may start."""

    def wait(self) -> None:
        """Returns when no update runs any more, the parameters as they are; raises what made it fail here."""

    def finish(self) -> None:
        """Returns when the parameters have followed all updates, on all ranks. A collective;
        :class:`FailedTogether` as of :meth:`run`."""

    def held_bytes(self) -> Mapping[Tier, int]:
        """Bytes by tier that hold gradients for updates, beside the units' own."""
        return {}

    def take_back(self) -> None:
        """``optimizer.step()`` is skipped: state and parameters are what they were before backward. A
        collective."""

    def forget(self) -> str | None:
        """The gradients are cleared, as by ``optimizer.zero_grad()``; returns what is damaged by it, if
        anything is."""
        return None

    def abandon(self) -> str | None:
        """A backward pass broke off; returns what is damaged by it, if anything is."""
        return None

    def drop(self) -> None:
        """State and parameters were replaced, as by a checkpoint."""

    def not_finite(self) -> list[int]:
        """With unreduced gradients: the ranks that have one which is not finite. A collective."""
        return []

    def kept(self) -> Iterator[Kept]:
        """State beside the optimizer's that a checkpoint has to hold."""
        return iter(())

    def make_kept(self, kinds: Mapping[str, tuple[str, ...]]) -> Callable[[], None]:
        """Before a checkpoint is loaded that holds the state named for each parameter: makes what
        :meth:`kept` will be. Returns what undoes it."""
        return lambda: None

    def leaves(self, kind: str) -> bool:
        """Whether state of this kind in the checkpoint is left aside."""
        return False

    def restore(self) -> None:
        """After a load: parameters follow what was kept, where they are not their masters rounded."""

    def _updates(self, done: Container[int] = ()) -> list[Update]:
        return [
            Update(number, gradients.for_optimizer())
            for number, gradients in enumerate(self._gradients)
            if gradients.contributed and number not in done
        ]


def any_stored(masters: Sequence[MasterShard], gradients: Sequence[UnitGradients]) -> bool:
    """Whether a step of ``masters`` with their ``gradients`` uses storage."""
    return any(
        "nvme" in (master.state.tier, master.unit.home.tier, own.home.tier)
        for master, own in zip(masters, gradients, strict=True)
    )


def settings_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The param groups' settings as they are now, as groups without parameters."""
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in {**group, "params": []}.items()
        }
        for group in groups
    ]


def publish(units: Iterable[Unit]) -> None:
    """Sends the parameters of ``units`` that other ranks need; a collective, alike on all ranks."""
    for pending in [unit.start_publishing() for unit in units]:
        if pending is not None:
            pending.wait()
