"""Tiers: where shards and optimizer state live when not on the device, and how they get there and back."""

from zero_ext.config.buffer_sizes import STORAGE_ALIGNMENT, StagingSizes, staging_chunk_elements
from zero_ext.offload.device_memory import CPU, Device
from zero_ext.offload.nvme.nvme_state_stream import AdamWork, NvmeState, StateChunk, stream_adam, visit_chunks
from zero_ext.offload.nvme.nvme_store import NvmeStore, Transfer
from zero_ext.offload.optimizer_state_storage import (
    MASTER,
    MemoryState,
    OptimizerStateStorage,
    StateField,
    asleep_error,
)
from zero_ext.offload.shard_storage import (
    MemoryShard,
    NvmeShard,
    ShardStorage,
    StorageRange,
    TransferStats,
    Values,
    allocate,
    copy_of,
    count,
    put,
    replace,
    subrange_of,
)
from zero_ext.offload.side_stream import COMPLETED, CopyHandle, SideStream
from zero_ext.offload.step_buffers import StepChunk, StepStaging
from zero_ext.offload.tier_manager import InitStorage, TierManager

__all__ = [
    "COMPLETED",
    "CPU",
    "MASTER",
    "STORAGE_ALIGNMENT",
    "AdamWork",
    "CopyHandle",
    "Device",
    "InitStorage",
    "MemoryShard",
    "MemoryState",
    "NvmeShard",
    "NvmeState",
    "NvmeStore",
    "OptimizerStateStorage",
    "ShardStorage",
    "SideStream",
    "StagingSizes",
    "StateChunk",
    "StateField",
    "StepChunk",
    "StepStaging",
    "StorageRange",
    "TierManager",
    "Transfer",
    "TransferStats",
    "Values",
    "allocate",
    "asleep_error",
    "copy_of",
    "count",
    "put",
    "replace",
    "staging_chunk_elements",
    "stream_adam",
    "subrange_of",
    "visit_chunks",
]
