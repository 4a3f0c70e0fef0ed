"""Where the shard of a unit's gradient lives, by its tier."""

from __future__ import annotations

import torch

from zero_ext.offload import Tiers
from zero_ext.zero.gradients.gradient_storage import (
    BorrowedGradients,
    GradientHome,
    MemoryGradients,
)
from zero_ext.zero.gradients.nvme_gradients import StoredGradients
from zero_ext.zero.memory.pool import BufferPool
from zero_ext.zero.units.unit import Unit


def sharded_home(
    unit: Unit,
    dtype: torch.dtype,
    accumulation_dtype: torch.dtype,
    pool: BufferPool,
    landings: BufferPool,
    tiers: Tiers,
    used_up: bool,
) -> GradientHome:
    """The home of the shard of ``unit``'s gradient; ``used_up``: an update in backward follows its reduction,
    so that the device need not keep it."""
    tier, numel = unit.placement.grads_tier, unit.layout.shard_numel
    if tier == "nvme":
        return StoredGradients(numel, dtype, accumulation_dtype, pool, tiers)
    if used_up and tier == "device":
        return BorrowedGradients(numel, dtype, accumulation_dtype, pool, tiers.transfers)
    memory = tiers.device.allocate(tier, numel, dtype)
    return MemoryGradients(tier, memory, accumulation_dtype, pool, tiers.transfers, landings)
