"""Storage of shards that are created before any engine exists, and are freed one by one."""

from __future__ import annotations

import weakref

import torch

from zero_ext.config import AioConfig, OffloadConfig
from zero_ext.offload.nvme.nvme_shard_storage import NvmeShard
from zero_ext.offload.nvme.nvme_store import NvmeStore
from zero_ext.offload.shard_storage import MemoryShard, ShardStorage
from zero_ext.offload.tier_manager import open_store
from zero_ext.offload.transfer_stats import TransferStats

# Storage grows in steps of this size: few for a large model, and little waste for a small one.
_GROWTH_BYTES = 64 << 20


class InitStorage:
    """Shards in the tier that ``policy`` names for parameters, each freed with its last reference.

    On NVMe it is a store of its own, which grows as shards are created. Its files go with the last shard and
    this object, at :meth:`close`, at the interpreter's exit, or after a crash when the next run opens the
    path. Raises ``RuntimeError`` where the store cannot be made.
    """

    def __init__(self, policy: OffloadConfig, aio: AioConfig) -> None:
        self.tier = policy.params
        self._transfers = TransferStats()
        self._store = open_store(policy.nvme_paths, aio, policy.checksum) if self.tier == "nvme" else None

    def allocate(self, numel: int, dtype: torch.dtype) -> ShardStorage:
        """Allocate a shard [numel]. ``RuntimeError`` with path and bytes if the device is full."""
        if self._store is None:
            return MemoryShard(self.tier, torch.zeros(numel, dtype=dtype, device="cpu"), self._transfers)
        nbytes, facts = numel * dtype.itemsize, self._store.facts()
        if facts.largest_free < nbytes:
            self._store.reserve(facts.capacity + max(nbytes, _GROWTH_BYTES), zeros=False)
        shard = NvmeShard(self._store, self._store.allocate(nbytes), numel, dtype, self._transfers)
        # The finalizer holds the store, which thus exists as long as its last shard. At exit the
        # store's own finalizer removes everything, so this one need not run.
        weakref.finalize(shard, _free, self._store, shard.offset).atexit = False
        return shard

    def close(self) -> None:
        """Drop all that is in storage, when construction of the model fails."""
        if self._store is not None:
            self._store.close()


def _free(store: NvmeStore, offset: int) -> None:
    if store.is_open:
        store.release(offset)
