"""Tiers: where shards and optimizer state live when not on the device, and how they get there and back."""

from zero_ext.offload.shard_home import STORAGE_ALIGNMENT, Arrival, ShardHome, allocate
from zero_ext.offload.state_home import MASTER, StateHome
from zero_ext.offload.step_parts import StepPart, StepStaging
from zero_ext.offload.tiers import Tiers
from zero_ext.offload.transfers import TransferLog

__all__ = [
    "MASTER",
    "STORAGE_ALIGNMENT",
    "Arrival",
    "ShardHome",
    "StateHome",
    "StepPart",
    "StepStaging",
    "Tiers",
    "TransferLog",
    "allocate",
]
