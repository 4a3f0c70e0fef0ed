"""When and how the owned ranges are updated, and the parameters sent to all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from zero_ext.comm import Collectives, Pending
from zero_ext.optim import Stepper, Update
from zero_ext.zero.gradients import UnitGradients
from zero_ext.zero.master import MasterShard
from zero_ext.zero.together import together
from zero_ext.zero.unit import Unit


class Updates(Protocol):
    """When the updates of a step run."""

    def run(self, scale: torch.Tensor, used: frozenset[str]) -> None:
        """``optimizer.step()`` has settled the gradients: their factor (0-d float32) and the names of the
        parameters that have one on any rank. A collective."""


class AfterBackward:
    """All updates of a step run inside ``optimizer.step()``, from the gradients of all units."""

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

    def run(self, scale: torch.Tensor, used: frozenset[str]) -> None:
        """See :class:`Updates`."""
        updates = [
            Update(number, gradients.for_optimizer())
            for number, gradients in enumerate(self._gradients)
            if gradients.contributed
        ]
        update_parameters(self._stepper, self._masters, updates, scale, used, self._collectives)


def update_parameters(
    stepper: Stepper,
    masters: Sequence[MasterShard],
    updates: Sequence[Update],
    scale: torch.Tensor,
    used: frozenset[str],
    collectives: Collectives,
) -> None:
    """Steps ``updates`` and publishes the parameters that other ranks need.

    Where state lies in storage, which may fail on one rank alone, all ranks agree before anything is
    published, and :class:`FailedTogether` is raised on all of them: state and parameters are then a mixture.
    """
    publishing: list[Pending | None] = []
    stored = any(master.state.tier == "nvme" or master.unit.home.tier == "nvme" for master in masters)
    stored = stored or any(update.gradient.tier == "nvme" for update in updates)
    if stored:
        numbers = together(
            collectives,
            lambda: list(stepper.step(updates, scale, used)),
            "the optimizer step",
            "State and parameters are now a mixture of before and after it; load the last checkpoint before "
            "going on.",
        )
        publishing = [masters[number].unit.start_publishing() for number in numbers]
    else:
        for number in stepper.step(updates, scale, used):
            publishing.append(masters[number].unit.start_publishing())
    for pending in publishing:
        if pending is not None:
            pending.wait()
