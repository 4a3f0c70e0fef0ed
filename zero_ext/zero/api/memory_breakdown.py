"""Bytes of a rank's state, by kind and by tier: what the engine holds, in one table."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from zero_ext.config import Tier

if TYPE_CHECKING:
    from zero_ext.zero.engine import Engine

KINDS = ("params", "grads", "optimizer", "staging")


def ledger_of(engine: Engine) -> dict[str, int]:
    """Bytes of memory, device and host, that this rank holds now: ``params``, ``grads``, ``optimizer``
    (master weights and moments), which are model state, and ``staging``, the pool behind gathered units and
    reductions under way and what offloaded steps pass through.

    fp32 parameters are their own master weights and count once, as params. Where updates are delayed they are
    not; gradients and, with the optimizer on NVMe, parameters that a delayed update uses count besides.
    """
    tiers = ledger_by_tier(engine)
    return {kind: tiers["device"][kind] + tiers["host"][kind] for kind in KINDS}


def ledger_by_tier(engine: Engine, wait: bool = True) -> dict[Tier, dict[str, int]]:
    """The same by tier; what lies on NVMe as well, in whole blocks where it is stored so.

    Without ``wait`` a delayed update must not be running: its state may be about to change.
    """
    step = engine.optimizer_step
    if wait:
        step.wait()
    held: dict[Tier, Counter[str]] = {"device": Counter(), "host": Counter(), "nvme": Counter()}
    for unit in engine.units:
        if unit.placement.params:
            held[unit.home.tier]["params"] += unit.home.numel * unit.home.dtype.itemsize
            held["device"]["params"] += unit.exchange.held_bytes()
        else:
            held["device"]["params"] += unit.flat.nbytes
    for gradients in engine.reducer.gradients:
        for tier, nbytes in gradients.held_bytes().items():
            held[tier]["grads"] += nbytes
    for master in engine.masters:
        held[master.state.tier]["optimizer"] += master.held_bytes()
        held["host"]["optimizer"] += master.ahead_bytes()
    if step.stepper is not None:
        for tier, nbytes in step.stepper.state_bytes().items():
            held[tier]["optimizer"] += nbytes
    if step.updates is not None:
        for tier, nbytes in step.updates.held_bytes().items():
            held[tier]["grads"] += nbytes
    held["device"]["staging"] = engine.pool.total_bytes
    held["host"]["staging"] = engine.landings.total_bytes
    held["host"]["staging"] += engine.collectives.staging_bytes
    for tier, nbytes in engine.tiers.staging_bytes().items():
        held[tier]["staging"] += nbytes
    return {tier: {kind: counts[kind] for kind in KINDS} for tier, counts in held.items()}
