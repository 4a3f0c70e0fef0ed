"""Counters of what checkpointed calls move, those of an engine or separate ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from zero_ext.comm import TrafficStats
from zero_ext.config.events import Bus
from zero_ext.offload import TransferStats


@dataclass(frozen=True)
class TransferCounters:
    """Counters of offloaded and partitioned inputs.

    Attributes:
        bus: publishes collectives, waits for storage, and calls where ``profile`` is set.
        traffic: bytes between the ranks, "activations" where inputs are gathered, "scalars" where compared.
        transfers: bytes between the tiers.
    """

    bus: Bus = field(default_factory=Bus)
    traffic: TrafficStats = field(default_factory=TrafficStats)
    transfers: TransferStats = field(default_factory=TransferStats)
