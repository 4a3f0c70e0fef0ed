"""The tiers of an engine, or of a model before it: storage for shards and optimizer state."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from zero_ext.config import AioConfig, OffloadConfig
from zero_ext.config.buffer_sizes import STORAGE_ALIGNMENT
from zero_ext.config.events import Bus
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.config.tiers import Tier, is_stored
from zero_ext.offload.bounce_buffer import BounceBuffer, DeviceTransferPath
from zero_ext.offload.device_memory import CPU, Device, numa_affinity
from zero_ext.offload.nvme.gpu_direct_storage import open_gpu_direct_storage
from zero_ext.offload.nvme.nvme_state_stream import NvmeState, StateStream
from zero_ext.offload.nvme.nvme_store import NvmeStore
from zero_ext.offload.optimizer_state_storage import MemoryState, OptimizerStateStorage, StateField
from zero_ext.offload.shard_storage import MemoryShard, NvmeShard, ShardStorage, TransferStats
from zero_ext.offload.step_buffers import StagingSizes, StepStaging

_log = logging.getLogger(__name__)


def open_store(paths: Sequence[str], aio: AioConfig, checksum: bool = False) -> NvmeStore:
    """Open an empty store on ``paths``, which verifies what it reads if it is to keep checksums.

    Folders that are missing are created with their parents and stay, as DeepSpeed's do.

    Raises:
        RuntimeError: A path is not a folder, or cannot be created or used.
    """
    for path in paths:
        _create_folder(Path(path).absolute())
    return NvmeStore(
        paths,
        backend=aio.backend,
        queue_depth=aio.queue_depth,
        block_bytes=aio.block_bytes,
        io_threads=aio.io_threads,
        checksum=checksum,
    )


def _create_folder(path: Path) -> None:
    try:
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            _log.warning("nvme path '%s' did not exist and was created", path)
    except (FileExistsError, NotADirectoryError) as error:
        found = next(each for each in (path, *path.parents) if os.path.lexists(each))
        raise RuntimeError(
            f"nvme path '{path}': expected a folder, got a file at '{found}'. Remove that file, or name "
            "another folder on the NVMe device."
        ) from error
    except OSError as error:
        raise RuntimeError(
            f"nvme path '{path}': expected a folder that exists or can be created, got: {error.strerror}. "
            "Name a folder on the NVMe device that this user may write to."
        ) from error


class TierManager:
    """Memory of ``device`` and of its host for one rank, and its store on NVMe if the policy names that tier.

    ``transfers`` counts what moves between the tiers. ``staging`` holds the buffers of a step in another tier
    than its gradients or parameters.

    Args:
        staging_sizes: sizes of those buffers, by tier.
        kinds: state of the optimizer besides the master weights, by the name of the rule that steps it; most
            optimizers have one, without a name. None where there is no optimizer.
        shadows: state in storage has a second extent, for steps that may be rolled back.
        bounce_buffer_bytes: size of the buffer between storage and an accelerator without a direct path.
        bus: receives the time spent waiting for storage.
        separate_masters: parameters are never their own master weights. Also true where updates are delayed
            (``delays_updates``): forward and backward use the parameters meanwhile.
    """

    def __init__(
        self,
        policy: OffloadConfig,
        aio: AioConfig,
        staging_sizes: Mapping[Tier, StagingSizes],
        kinds: Mapping[str, Mapping[str, StateField]] | None = None,
        shadows: bool = False,
        device: Device = CPU,
        bounce_buffer_bytes: int = 0,
        bus: Bus | None = None,
        separate_masters: bool = False,
    ) -> None:
        self.device = device
        self.bus = Bus() if bus is None else bus
        self.transfers = TransferStats()
        self.delays_updates = policy.update_mode == "delayed"
        self.separate_masters = separate_masters or self.delays_updates
        self._shadows = shadows
        self.staging = StepStaging(staging_sizes, device)
        self._store: NvmeStore | None = None
        self._streams: dict[str, StateStream] = {}
        if policy.any_nvme:
            with numa_affinity(device.device):  # its threads
                self._store = open_store(policy.nvme_paths, aio, policy.checksum)
                self._store.bus = self.bus
            if is_stored(policy.optimizer) and kinds:
                ring = policy.staging_buffer_bytes // len(kinds)
                self._streams = {
                    rule: StateStream(self._store, ring, own, self.transfers, self.bus)
                    for rule, own in kinds.items()
                }
        self._transfer_path = (
            self._open_transfer_path(aio, bounce_buffer_bytes) if bounce_buffer_bytes else None
        )

    def stored_bytes(self, tier: Tier, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of the store that a shard in ``tier`` takes."""
        return -(-numel * dtype.itemsize // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT if is_stored(tier) else 0

    def stored_state_bytes(self, tier: Tier, numel: int, rule: str = "") -> int:
        """Return the bytes of the store that the optimizer state of ``numel`` elements in ``tier`` takes, in
        the kinds of ``rule``."""
        if not is_stored(tier):
            return 0
        return self._stream(rule).extent_bytes(numel) * (2 if self._shadows else 1)

    def reserve(self, nbytes: int) -> None:
        """Reserve ``nbytes`` in the store and write them once. ``RuntimeError`` if space is short."""
        if self._store is not None:
            self._store.reserve(max(nbytes, self._store.facts().capacity))

    def wrap_memory(self, tensor: torch.Tensor) -> ShardStorage:
        """Return existing device memory as the storage of a shard."""
        return MemoryShard("device", tensor, self.transfers, self.device)

    def allocate_shard(self, tier: Tier, numel: int, dtype: torch.dtype) -> ShardStorage:
        """Allocate a zeroed shard [numel] in ``tier``."""
        if is_stored(tier):
            return self.allocate_nvme_shard(numel, dtype)
        return MemoryShard(tier, self.device.allocate(tier, numel, dtype), self.transfers, self.device)

    def allocate_nvme_shard(self, numel: int, dtype: torch.dtype) -> NvmeShard:
        """Allocate a zeroed shard [numel] in the store."""
        offset = self.store.allocate(numel * dtype.itemsize)
        return NvmeShard(self.store, offset, numel, dtype, self.transfers, self._transfer_path)

    def allocate_optimizer_state(
        self, tier: Tier, numel: int, master: torch.Tensor | None, rule: str = ""
    ) -> OptimizerStateStorage:
        """Allocate optimizer state of ``numel`` elements in ``tier``, with ``master`` or zeroed values and
        the kinds of ``rule``."""
        if is_stored(tier):
            return NvmeState(self._stream(rule), numel, self._shadows)
        if master is None:
            master = self.device.allocate(tier, numel, torch.float32)
        return MemoryState(tier, master, self.device)

    @property
    def store(self) -> NvmeStore:
        """The store on NVMe."""
        if self._store is None:
            raise zero_ext_bug("no state kind is stored on NVMe")
        return self._store

    def _stream(self, rule: str) -> StateStream:
        if rule not in self._streams:
            raise zero_ext_bug(f"the optimizer state of rule '{rule}' is not stored on NVMe")
        return self._streams[rule]

    def staging_bytes(self) -> dict[Tier, int]:
        """Return the bytes of staging memory by tier."""
        ring = sum(stream.staging_buffer_bytes for stream in self._streams.values())
        staging = self.staging.allocated_bytes()
        bounce = self._transfer_path.nbytes if self._transfer_path is not None else 0
        return {**staging, "host": staging["host"] + ring + bounce}

    def _open_transfer_path(self, aio: AioConfig, bounce_buffer_bytes: int) -> DeviceTransferPath:
        direct = (
            open_gpu_direct_storage(self.store, self.device) if aio.gpu_direct_storage == "auto" else None
        )
        return direct or BounceBuffer(self.device, bounce_buffer_bytes)


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
        self._store = open_store(policy.nvme_paths, aio, policy.checksum) if is_stored(self.tier) else None

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
