"""Memory, traffic and transfers of an engine, in bytes per step."""

from __future__ import annotations

import weakref

import torch

from zero_ext.config.events import Event, StepEnd
from zero_ext.monitor.metric_row import Value
from zero_ext.monitor.sources.process_memory import resident_bytes
from zero_ext.zero.engine import Engine

TRAFFIC_KINDS = ("gather", "gather_updated", "reduce_scatter", "gather_gradients", "activations", "scalars")


class EngineBytes:
    """Source of the bytes that this rank holds at the end of a step, and that it moved in it.

    `memory/device`, `memory/host` and `memory/nvme` are the engine's memory breakdown by tier,
    `memory/process` is the process's resident set. On an accelerator, `memory/allocated` and
    `memory/peak` are what torch's allocator holds now and held at most. `traffic/...` are bytes sent by
    kind of collective, including units below the persistence threshold. `traffic/inter_node` are bytes of
    all kinds sent to other nodes, where there are several. `transfer/A_to_B` are bytes moved between tiers.

    Args:
        engine: the owner of the bytes; held weakly.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self, event: Event) -> None:
        """Do nothing: all is read from the engine.

        Args:
            event: any event of the engine.
        """

    def values(self, end: StepEnd) -> dict[str, Value]:
        """Return the bytes of a step.

        Args:
            end: the end of the step.

        Returns:
            Bytes by name; empty once the engine is gone.
        """
        engine = self._engine()
        if engine is None:
            return {}
        tiers = engine.memory_by_tier(wait=False)
        held: dict[str, Value] = {f"memory/{tier}": sum(kinds.values()) for tier, kinds in tiers.items()}
        held["memory/process"] = resident_bytes()
        if engine.device.type != "cpu":
            held["memory/allocated"] = torch.accelerator.memory_allocated(engine.device)
            held["memory/peak"] = torch.accelerator.max_memory_allocated(engine.device)
        sent = engine.traffic.last_bytes_sent
        held.update({f"traffic/{kind}": sent[kind] + sent[f"{kind}_persistent"] for kind in TRAFFIC_KINDS})
        if engine.collectives.nodes.nodes > 1:
            held["traffic/inter_node"] = engine.traffic.last_crossing_bytes.total()
        moved = engine.tiers.transfers.last_moved
        held.update(
            {f"transfer/{source}_to_{target}": nbytes for (source, target), nbytes in sorted(moved.items())}
        )
        return held
