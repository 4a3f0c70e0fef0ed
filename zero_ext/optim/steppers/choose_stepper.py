"""Chooses how the user's optimizer runs on shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_ext.offload import StateField, TierManager
from zero_ext.optim.elementwise_check import (
    check_elementwise,
    elementwise_kinds,
    fusible,
    is_one_bit,
    streamable,
)
from zero_ext.optim.lamb import Lamb
from zero_ext.optim.one_bit.onebit_lamb import OneBitLamb
from zero_ext.optim.one_bit.onebit_lamb_stepper import OneBitLambStepper
from zero_ext.optim.one_bit.onebit_optimizer import OneBitOptimizer
from zero_ext.optim.one_bit.onebit_stepper import OneBitStepper
from zero_ext.optim.steppers.elementwise import ElementwiseStepper
from zero_ext.optim.steppers.elementwise_stream import ElementwiseStream
from zero_ext.optim.steppers.fused import AdamStepper, LionStepper
from zero_ext.optim.steppers.lamb_stepper import LambStepper
from zero_ext.optim.steppers.moments import LION_MOMENTS, MomentsDtype, moment_fields
from zero_ext.optim.steppers.multi_tier_stepper import MultiTierStepper
from zero_ext.optim.steppers.stepper import OwnedRange, Stepper, Total


def make_stepper(
    optimizer: torch.optim.Optimizer,
    ranges: Sequence[OwnedRange],
    moments_dtype: MomentsDtype,
    elementwise: bool,
    tiers: TierManager,
    total: Total,
) -> Stepper:
    """Return the stepper for a user's optimizer: fused for Adam, AdamW, Lamb and, in memory, Lion and the
    one-bit family; else the class's own code on the shards. `total` sums up what a step needs of all
    ranks.

    Raises `ValueError` if the class needs whole tensors, or is unknown and `elementwise` is False, or if
    moments in 8 bits are asked of any but Adam and AdamW.
    """
    if isinstance(optimizer, OneBitLamb):
        return OneBitLambStepper(optimizer, optimizer.param_groups, ranges, tiers.staging)
    if isinstance(optimizer, OneBitOptimizer):
        return OneBitStepper(optimizer, optimizer.param_groups, ranges, tiers.staging)
    if streamable(optimizer):
        return AdamStepper(optimizer.param_groups, ranges, moments_dtype, tiers.staging)
    if type(optimizer) is not Lamb:
        check_elementwise(optimizer, elementwise)
    if moments_dtype == "8bit":
        raise ValueError(
            "precision.moments_dtype: expected Adam or AdamW without amsgrad for '8bit', got "
            f"{type(optimizer).__name__}, which stores state in floats only. Remove the key."
        )
    if type(optimizer) is Lamb:
        return LambStepper(optimizer.param_groups, ranges, moments_dtype, tiers.staging, total)
    stored = [number for number, owned in enumerate(ranges) if owned.state.tier == "nvme"]
    live = [number for number, owned in enumerate(ranges) if owned.state.tier != "nvme"]
    of_live = [ranges[number] for number in live]
    in_memory: Stepper = (
        LionStepper(optimizer.param_groups, of_live, moments_dtype, tiers.staging)
        if fusible(optimizer)
        else ElementwiseStepper(optimizer, of_live, tiers.staging)
    )
    if not stored:
        return in_memory
    streamed = ElementwiseStream(optimizer, [ranges[number] for number in stored], tiers.staging)
    return MultiTierStepper([(in_memory, live), (streamed, stored)])


def state_kinds(optimizer: torch.optim.Optimizer, moments_dtype: MomentsDtype) -> dict[str, StateField]:
    """Return the state that `make_stepper`'s stepper keeps besides the master weights, in the order that a
    step on NVMe wants."""
    if streamable(optimizer) or is_one_bit(optimizer):
        return moment_fields(moments_dtype)
    if type(optimizer) is Lamb and moments_dtype != "8bit":
        return moment_fields(moments_dtype)
    if fusible(optimizer) and moments_dtype != "8bit":
        return dict.fromkeys(LION_MOMENTS, StateField(moments_dtype))
    kinds = {kind for group in optimizer.param_groups for kind in elementwise_kinds(optimizer, group)}
    return dict.fromkeys(sorted(kinds), StateField(torch.float32))
