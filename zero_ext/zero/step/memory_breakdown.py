"""Bytes of a rank's state, by kind and by tier: what the engine holds, in one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from zero_ext.comm import Collectives
from zero_ext.config.tiers import TIERS, Tier
from zero_ext.offload import TierManager
from zero_ext.zero.gradients.accumulator import UnitGradients
from zero_ext.zero.memory.pool import BufferPool
from zero_ext.zero.step.optimizer_step import OptimizerStep
from zero_ext.zero.units.master_weights import MasterShard
from zero_ext.zero.units.unit import Unit

KINDS = ("params", "grads", "optimizer", "staging")


def memory_by_tier(
    units: Iterable[Unit],
    masters: Iterable[MasterShard],
    gradients: Iterable[UnitGradients],
    step: OptimizerStep,
    collectives: Collectives,
    tiers: TierManager,
    pools: Mapping[Tier, BufferPool],
) -> dict[Tier, dict[str, int]]:
    """Return the bytes that this rank holds by tier and kind, on NVMe in the blocks that are stored.

    The kinds are ``params``, ``grads``, ``optimizer`` (master weights, and moments or momentum), which are
    model state, and ``staging``: the pool of gathered units and running reductions, and what offloaded steps
    pass through. Memory that a step on full matrices has while it runs is not held after it.

    fp32 parameters are their own master weights and count once, as params. With delayed updates they are not:
    gradients, and with the optimizer on NVMe parameters, that a delayed update uses count in addition.
    """
    held: dict[Tier, Counter[str]] = {tier: Counter() for tier in TIERS}
    for unit in units:
        if unit.placement.params:
            held[unit.storage.tier]["params"] += unit.storage.numel * unit.storage.dtype.itemsize
            held["device"]["params"] += unit.param_gather.allocated_bytes()
        else:
            held["device"]["params"] += unit.flat.nbytes
    for unit_gradients in gradients:
        for tier, nbytes in unit_gradients.allocated_bytes().items():
            held[tier]["grads"] += nbytes
    for master in masters:
        held[master.state.tier]["optimizer"] += master.allocated_bytes()
        held["host"]["optimizer"] += master.ahead_bytes()
    if step.stepper is not None:
        for tier, nbytes in step.stepper.state_bytes().items():
            held[tier]["optimizer"] += nbytes
    for tier, nbytes in step.updates.allocated_bytes().items():
        held[tier]["grads"] += nbytes
    for tier, pool in pools.items():
        held[tier]["staging"] = pool.total_bytes
    held["host"]["staging"] += collectives.staging_bytes
    for tier, nbytes in tiers.staging_bytes().items():
        held[tier]["staging"] += nbytes
    return {tier: {kind: counts[kind] for kind in KINDS} for tier, counts in held.items()}
