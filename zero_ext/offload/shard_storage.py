"""Storage of a rank's shard of a unit's parameters between uses."""

from __future__ import annotations

from typing import Protocol

import torch

from zero_ext.config import Tier
from zero_ext.offload.device.device_memory import CPU, Device
from zero_ext.offload.device.side_stream import COMPLETED, CopyHandle
from zero_ext.offload.storage_range import StorageRange, Values
from zero_ext.offload.transfer_stats import TransferStats


class ShardStorage(Protocol):
    """A shard [numel] of one dtype in one tier. It moves in multiples of ``grain`` elements."""

    tier: Tier
    numel: int
    dtype: torch.dtype
    grain: int

    def fetch(self, into: torch.Tensor, begin: int = 0, target: Tier = "device") -> CopyHandle:
        """Start to copy the elements from ``begin`` on into ``into`` [n], memory of tier ``target``.

        ``begin`` and n are multiples of ``grain``, n also at the end of the shard.
        """

    def store(self, begin: int, values: torch.Tensor, source: Tier) -> CopyHandle:
        """Start to replace the elements from ``begin`` on by ``values``, in memory of tier ``source``.

        Later reads wait for the copy.
        """

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return the elements [begin, end): live memory, or a copy from storage. Not counted."""

    def view(self, begin: int, end: int) -> Values:
        """Return the elements [begin, end) where they are stored."""
        return StorageRange(
            begin, end - begin, self.dtype, self.read, lambda first, values: put(self, first, values, "host")
        )

    def subrange(self, begin: int, end: int) -> ShardStorage:
        """Return the elements [begin, end), both multiples of ``grain`` or the shard's end, as a shard."""

    def memory(self, tier: Tier) -> torch.Tensor | None:
        """Return the shard itself if it is in memory of ``tier``, else None."""
        return None


class MemoryShard(ShardStorage):
    """A shard in device or host memory."""

    grain = 1

    def __init__(
        self, tier: Tier, tensor: torch.Tensor, transfers: TransferStats, device: Device = CPU
    ) -> None:
        self.tier = tier
        self.numel = tensor.numel()
        self.dtype = tensor.dtype
        self._memory = tensor
        self._transfers = transfers
        self._device = device
        self._written: CopyHandle = COMPLETED
        self._fetched: CopyHandle = COMPLETED

    @property
    def _tensor(self) -> torch.Tensor:
        """The memory, once copies into it and out of it have ended."""
        self._fetched.wait_source()
        self._fetched = COMPLETED
        return self._readable()

    def _readable(self) -> torch.Tensor:
        self._written.wait()
        self._written = COMPLETED
        return self._memory

    def fetch(self, into: torch.Tensor, begin: int = 0, target: Tier = "device") -> CopyHandle:
        # ``_tensor`` would wait for other copies out of the memory, which may run simultaneously.
        source = self._readable()
        if begin or into.numel() != self.numel:
            source = source[begin : begin + into.numel()]
        if into.data_ptr() == source.data_ptr():
            return COMPLETED
        self._transfers.record(self.tier, target, into.nbytes)
        # Copies in one direction end in order, so the last one stands for all.
        copy = self._device.copy(into, source)
        # A copy that is complete must not replace the handle of one that still reads the memory.
        if copy is not COMPLETED:
            self._fetched = copy
        return copy

    def store(self, begin: int, values: torch.Tensor, source: Tier) -> CopyHandle:
        """Replace elements. ``values`` of another dtype are stored when this returns."""
        target = self._memory[begin : begin + values.numel()]
        if target.data_ptr() == values.data_ptr():
            return COMPLETED
        self._transfers.record(source, self.tier, target.nbytes)
        # ``Device.copy`` does not cast, so a conversion is made here.
        if values.dtype != target.dtype or values.device == target.device:
            self._tensor[begin : begin + values.numel()].copy_(values)
            return COMPLETED
        self._fetched.wait_source()
        self._written = self._device.copy(target, values)
        return self._written

    def read(self, begin: int, end: int) -> torch.Tensor:
        return self._tensor[begin:end]

    view = read

    def subrange(self, begin: int, end: int) -> ShardStorage:
        return MemoryShard(self.tier, self._tensor[begin:end], self._transfers, self._device)

    def memory(self, tier: Tier) -> torch.Tensor | None:
        return self._tensor if tier == self.tier else None


def put(shard: ShardStorage, begin: int, values: torch.Tensor, source: Tier) -> None:
    """Store ``values``, which may be changed once it returns. Values from the host are stored by then."""
    shard.store(begin, values, source).wait_source()


def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a zeroed flat tensor [numel] on the host's huge pages."""
    return CPU.allocate("host", numel, dtype)
