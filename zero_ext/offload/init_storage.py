"""Where shards lie that are made before any engine exists, one by one, and go one by one."""

from __future__ import annotations

import weakref

import torch

from zero_ext.config import AioPolicy, OffloadPolicy
from zero_ext.offload.nvme.nvme_shard_storage import StoredHome
from zero_ext.offload.nvme.nvme_store import NvmeStore
from zero_ext.offload.shard_storage import MemoryHome, ShardHome
from zero_ext.offload.tier_manager import open_store
from zero_ext.offload.transfer_stats import TransferLog

# Room in storage is made in steps of this: few of them for a model, and little too much for a small one.
_GROWTH_BYTES = 64 << 20


class Birthplace:
    """Homes in the tier that ``policy`` names for parameters, each freed when nobody holds it any more.

    On NVMe it is a store of its own, which grows as homes are made and whose files go with the last home and
    this object, at :meth:`close`, at the interpreter's exit, or after a crash when the next run opens the
    path. Raises ``RuntimeError`` where the store cannot be made.
    """

    def __init__(self, policy: OffloadPolicy, aio: AioPolicy) -> None:
        self.tier = policy.params
        self._transfers = TransferLog()
        self._store = open_store(policy.nvme_paths, aio, policy.checksum) if self.tier == "nvme" else None

    def home(self, numel: int, dtype: torch.dtype) -> ShardHome:
        """Room for a shard [numel]. ``RuntimeError`` with path and bytes if the device is full."""
        if self._store is None:
            return MemoryHome(self.tier, torch.zeros(numel, dtype=dtype, device="cpu"), self._transfers)
        nbytes, facts = numel * dtype.itemsize, self._store.facts()
        if facts.largest_free < nbytes:
            self._store.reserve(facts.capacity + max(nbytes, _GROWTH_BYTES), zeros=False)
        home = StoredHome(self._store, self._store.allocate(nbytes), numel, dtype, self._transfers)
        weakref.finalize(home, _free, self._store, home.offset).atexit = False
        return home

    def close(self) -> None:
        """Drops all that lies in storage, for a model that will not be."""
        if self._store is not None:
            self._store.close()


def _free(store: NvmeStore, offset: int) -> None:
    if store.is_open:
        store.release(offset)
