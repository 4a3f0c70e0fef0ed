"""Bytes of a rank's state, by kind: what the engine holds, in one table."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zero_ext.zero.engine import Engine


def ledger_of(engine: Engine) -> dict[str, int]:
    """Bytes this rank holds now: ``params``, ``grads``, ``optimizer`` (master weights and moments), which are
    model state, and ``staging``, the pool behind gathered units and reductions under way.

    fp32 parameters are their own master weights and count once, as params.
    """
    params = sum(
        unit.home.numel * unit.home.dtype.itemsize if unit.placement.params else unit.flat.nbytes
        for unit in engine.units
    )
    grads = sum(gradients.persistent_bytes() for gradients in engine.reducer.gradients)
    states = sum(master.memory_bytes() for master in engine.masters)
    stepper = engine.optimizer_step.stepper
    beside = stepper.state_bytes() if stepper is not None else 0
    return {
        "params": params,
        "grads": grads,
        "optimizer": states + beside,
        "staging": engine.pool.total_bytes + engine.tiers.staging_bytes(),
    }
