"""Chooses how the user's optimizer runs on shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_ext.offload import Tiers
from zero_ext.optim.compatibility import check_elementwise, fusible
from zero_ext.optim.elementwise import ElementwiseStepper
from zero_ext.optim.fused import AdamStepper
from zero_ext.optim.stepper import OwnedRange, Stepper


def make_stepper(
    optimizer: torch.optim.Optimizer,
    ranges: Sequence[OwnedRange],
    moments_dtype: torch.dtype,
    elementwise: bool,
    tiers: Tiers,
) -> Stepper:
    """The stepper for a user's optimizer: fused for Adam and AdamW, else torch's own code on the shards.

    Raises ``ValueError`` if the class needs whole tensors, or is unknown and ``elementwise`` is False.
    """
    if fusible(optimizer):
        return AdamStepper(optimizer.param_groups, ranges, moments_dtype, tiers.staging)
    check_elementwise(optimizer, elementwise)
    return ElementwiseStepper(optimizer, ranges, tiers.transfers)
