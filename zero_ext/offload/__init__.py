"""Tiers: where shards and optimizer state live when not on the device, and how they get there and back."""

from zero_ext.config.rooms import STORAGE_ALIGNMENT, StepRooms, part_elements
from zero_ext.offload.birthplace import Birthplace
from zero_ext.offload.device import CPU, Device
from zero_ext.offload.nvme_store import NvmeStore, Transfer
from zero_ext.offload.shard_home import MemoryHome, ShardHome, allocate, put
from zero_ext.offload.state_chunks import StateChunk, visit_chunks
from zero_ext.offload.state_home import MASTER, StateField, StateHome
from zero_ext.offload.state_stream import AdamWork, NvmeState, stream_adam
from zero_ext.offload.step_parts import StepPart, StepStaging
from zero_ext.offload.stored_home import StoredHome
from zero_ext.offload.stored_run import StoredRun, Values, copy_of, count, part_of, replace
from zero_ext.offload.streams import HERE, Arrival, SideStream
from zero_ext.offload.tiers import Tiers
from zero_ext.offload.transfers import TransferLog

__all__ = [
    "CPU",
    "HERE",
    "MASTER",
    "STORAGE_ALIGNMENT",
    "AdamWork",
    "Arrival",
    "Birthplace",
    "Device",
    "MemoryHome",
    "NvmeState",
    "NvmeStore",
    "ShardHome",
    "SideStream",
    "StateChunk",
    "StateField",
    "StateHome",
    "StepPart",
    "StepRooms",
    "StepStaging",
    "StoredHome",
    "StoredRun",
    "Tiers",
    "Transfer",
    "TransferLog",
    "Values",
    "allocate",
    "copy_of",
    "count",
    "part_elements",
    "part_of",
    "put",
    "replace",
    "stream_adam",
    "visit_chunks",
]
