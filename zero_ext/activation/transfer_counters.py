"""Who counts what checkpointed calls move: an engine's own counters, or those of one's own."""

from __future__ import annotations

from dataclasses import dataclass, field

from zero_ext.comm import WireLog
from zero_ext.config.events import Bus
from zero_ext.offload import TransferLog


@dataclass(frozen=True)
class Counters:
    """Where kept inputs are counted.

    Attributes:
        bus: hears of collectives, of waits for storage, and of calls where ``profile`` is set.
        wire: bytes between the ranks, "activations" where inputs are gathered, "scalars" where compared.
        transfers: bytes between the tiers.
    """

    bus: Bus = field(default_factory=Bus)
    wire: WireLog = field(default_factory=WireLog)
    transfers: TransferLog = field(default_factory=TransferLog)
