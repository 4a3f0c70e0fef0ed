"""The tiers of one engine: makes homes for shards and state, and owns what they share."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from zero_ext.config import AioPolicy, OffloadPolicy, Tier
from zero_ext.config.buffer_sizes import STORAGE_ALIGNMENT
from zero_ext.config.events import Bus
from zero_ext.offload.device.bounce_buffer import DeviceWay, Transit
from zero_ext.offload.device.device_memory import CPU, Device
from zero_ext.offload.device.numa import near
from zero_ext.offload.nvme.gpu_direct_storage import direct_storage
from zero_ext.offload.nvme.nvme_shard_storage import StoredHome
from zero_ext.offload.nvme.nvme_state_stream import NvmeState, StateStream
from zero_ext.offload.nvme.nvme_store import NvmeStore
from zero_ext.offload.optimizer_state_storage import MemoryState, StateField, StateHome
from zero_ext.offload.shard_storage import MemoryHome, ShardHome
from zero_ext.offload.step_buffers import StepRooms, StepStaging
from zero_ext.offload.transfer_stats import TransferLog

_log = logging.getLogger(__name__)


def open_store(paths: Sequence[str], aio: AioPolicy, checksum: bool = False) -> NvmeStore:
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
        submitters=aio.submitters,
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


class Tiers:
    """Memory of ``device`` and of its host for one rank, and its store on NVMe if the policy names that tier.

    ``transfers`` counts what moves between the tiers, ``staging`` is what a step in another tier than its
    gradients or parameters goes through, of the size of ``rooms``. ``kinds`` is the state that the optimizer
    keeps beside the master weights; None where there is no optimizer. ``shadows`` says that state in storage
    has room for what it is after a step that may be taken back, ``transit_bytes`` is the size of what passes
    between storage and an accelerator where it cannot go directly, ``delays_updates`` says that master
    weights are updated while forward and backward use the parameters, ``parts_masters`` that parameters are
    never their own master weights. ``bus`` hears how long storage is
    waited for.
    """

    def __init__(
        self,
        policy: OffloadPolicy,
        aio: AioPolicy,
        rooms: Mapping[Tier, StepRooms],
        kinds: Mapping[str, StateField] | None = None,
        shadows: bool = False,
        device: Device = CPU,
        transit_bytes: int = 0,
        bus: Bus | None = None,
        parts_masters: bool = False,
    ) -> None:
        self.device = device
        self.bus = Bus() if bus is None else bus
        self.transfers = TransferLog()
        self.delays_updates = policy.step == "delayed"
        self.parts_masters = parts_masters or self.delays_updates
        self._shadows = shadows
        self.staging = StepStaging(rooms, device)
        self._store: NvmeStore | None = None
        self._stream: StateStream | None = None
        if policy.any_nvme:
            with near(device.device):  # its threads
                self._store = open_store(policy.nvme_paths, aio, policy.checksum)
                self._store.bus = self.bus
            if policy.optimizer == "nvme" and kinds is not None:
                self._stream = StateStream(self._store, policy.ring_bytes, kinds, self.transfers, self.bus)
        self._way = self._way_to_storage(aio, transit_bytes) if transit_bytes else None

    def stored_bytes(self, tier: Tier, numel: int, dtype: torch.dtype) -> int:
        """Bytes of the store that the home of a shard takes in ``tier``."""
        return -(-numel * dtype.itemsize // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT if tier == "nvme" else 0

    def stored_state_bytes(self, tier: Tier, numel: int) -> int:
        """Bytes of the store that the optimizer state of ``numel`` elements takes in ``tier``."""
        return self.stream.extent_bytes(numel) * (2 if self._shadows else 1) if tier == "nvme" else 0

    def reserve(self, nbytes: int) -> None:
        """Makes room for ``nbytes`` in the store, written once here; ``RuntimeError`` if there is too
        little."""
        if self._store is not None:
            self._store.reserve(max(nbytes, self._store.facts().capacity))

    def in_memory(self, tensor: torch.Tensor) -> ShardHome:
        """Device memory that exists already, as the home of a shard."""
        return MemoryHome("device", tensor, self.transfers, self.device)

    def shard_home(self, tier: Tier, numel: int, dtype: torch.dtype) -> ShardHome:
        """Zeroed room for a shard [numel] in ``tier``."""
        if tier == "nvme":
            return self.stored_home(numel, dtype)
        return MemoryHome(tier, self.device.allocate(tier, numel, dtype), self.transfers, self.device)

    def stored_home(self, numel: int, dtype: torch.dtype) -> StoredHome:
        """Zeroed room for a shard [numel] in the store."""
        offset = self.store.allocate(numel * dtype.itemsize)
        return StoredHome(self.store, offset, numel, dtype, self.transfers, self._way)

    def state_home(self, tier: Tier, numel: int, master: torch.Tensor | None) -> StateHome:
        """Room for the optimizer state of ``numel`` elements in ``tier``: ``master`` if given, else zeroed
        fp32 values."""
        if tier == "nvme":
            return NvmeState(self.stream, numel, self._shadows)
        if master is None:
            master = self.device.allocate(tier, numel, torch.float32)
        return MemoryState(tier, master, self.device)

    @property
    def store(self) -> NvmeStore:
        """The store on NVMe."""
        if self._store is None:
            raise AssertionError("no state kind lives on NVMe")
        return self._store

    @property
    def stream(self) -> StateStream:
        """What optimizer state on NVMe passes through."""
        if self._stream is None:
            raise AssertionError("the optimizer does not live on NVMe")
        return self._stream

    def staging_bytes(self) -> dict[Tier, int]:
        """Bytes of memory that steps in other tiers go through, by tier."""
        ring = self._stream.ring_bytes if self._stream is not None else 0
        held = self.staging.held_bytes()
        way = self._way.nbytes if self._way is not None else 0
        return {**held, "host": held["host"] + ring + way}

    def _way_to_storage(self, aio: AioPolicy, transit_bytes: int) -> DeviceWay:
        direct = direct_storage(self.store, self.device) if aio.direct_storage == "auto" else None
        return direct or Transit(self.device, transit_bytes)
