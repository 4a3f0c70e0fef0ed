"""The update of a step: every owned range, then the parameters to all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_ext.comm import Collectives, Pending
from zero_ext.optim import Stepper, Update
from zero_ext.zero.master import MasterShard
from zero_ext.zero.together import together


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
