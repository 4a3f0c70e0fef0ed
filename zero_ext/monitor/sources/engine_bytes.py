"""Bytes that an engine holds, sends and moves, as values of a step."""

from __future__ import annotations

import weakref

import torch

from zero_ext.config.events import Event, StepEnd
from zero_ext.monitor.metric_row import Value
from zero_ext.monitor.sources.process_memory import resident_bytes
from zero_ext.zero.api.memory_breakdown import ledger_by_tier
from zero_ext.zero.engine import Engine

WIRE = ("gather", "gather_updated", "reduce_scatter", "gather_gradients", "activations", "scalars")


class EngineBytes:
    """Source of what this rank holds at the end of a step, and what it moved in it.

    ``memory/device``, ``memory/host`` and ``memory/nvme`` are the engine's ledger by tier, ``memory/process``
    the process's resident set, ``memory/allocated`` and ``memory/peak`` what torch's allocator has given out
    on an accelerator, now and at most so far. ``wire/...`` are bytes sent by kind of collective, units below
    the persistence threshold included, ``wire/crossing`` those of all kinds that went to other nodes, where
    there are several, and ``moved/A_to_B`` bytes moved between tiers.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self, event: Event) -> None:
        """See :class:`Source`: all is read from the engine."""

    def values(self, end: StepEnd) -> dict[str, Value]:
        """See :class:`Source`; nothing once the engine is gone."""
        engine = self._engine()
        if engine is None:
            return {}
        tiers = ledger_by_tier(engine, wait=False)
        held: dict[str, Value] = {f"memory/{tier}": sum(kinds.values()) for tier, kinds in tiers.items()}
        held["memory/process"] = resident_bytes()
        if engine.device.type != "cpu":
            held["memory/allocated"] = torch.accelerator.memory_allocated(engine.device)
            held["memory/peak"] = torch.accelerator.max_memory_allocated(engine.device)
        sent = engine.wire.last_bytes_sent
        held.update({f"wire/{kind}": sent[kind] + sent[f"{kind}_persistent"] for kind in WIRE})
        if engine.collectives.nodes.nodes > 1:
            held["wire/crossing"] = engine.wire.last_crossing_bytes.total()
        moved = engine.tiers.transfers.last_moved
        held.update(
            {f"moved/{source}_to_{target}": nbytes for (source, target), nbytes in sorted(moved.items())}
        )
        return held
