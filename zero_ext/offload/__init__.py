"""Tiers: where shards and optimizer state live when not on the device, and how they get there and back."""

from zero_ext.config.buffer_sizes import STORAGE_ALIGNMENT, StepRooms, part_elements
from zero_ext.offload.device.device_memory import CPU, Device
from zero_ext.offload.device.side_stream import HERE, Arrival, SideStream
from zero_ext.offload.init_storage import Birthplace
from zero_ext.offload.nvme.nvme_shard_storage import StoredHome
from zero_ext.offload.nvme.nvme_state_chunks import StateChunk, visit_chunks
from zero_ext.offload.nvme.nvme_state_stream import AdamWork, NvmeState, stream_adam
from zero_ext.offload.nvme.nvme_store import NvmeStore, Transfer
from zero_ext.offload.optimizer_state_storage import MASTER, StateField, StateHome
from zero_ext.offload.shard_storage import MemoryHome, ShardHome, allocate, put
from zero_ext.offload.step_buffers import StepPart, StepStaging
from zero_ext.offload.storage_range import StoredRun, Values, copy_of, count, part_of, replace
from zero_ext.offload.tier_manager import Tiers
from zero_ext.offload.transfer_stats import TransferLog

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
