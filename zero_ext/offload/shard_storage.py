"""Where a rank's shard of a unit's parameters lives between uses."""

from __future__ import annotations

from typing import Protocol

import torch

from zero_ext.config import Tier
from zero_ext.offload.device.device_memory import CPU, Device
from zero_ext.offload.device.side_stream import HERE, Arrival
from zero_ext.offload.storage_range import Values
from zero_ext.offload.transfer_stats import TransferLog


class ShardHome(Protocol):
    """A shard [numel] of one dtype in one tier; it moves in multiples of ``grain`` elements."""

    tier: Tier
    numel: int
    dtype: torch.dtype
    grain: int

    def fetch(self, into: torch.Tensor, begin: int = 0, target: Tier = "device") -> Arrival:
        """Starts copying the elements from ``begin`` on into ``into`` [n], memory of tier ``target``; n is a
        multiple of ``grain``, also at the end of the shard."""

    def store(self, begin: int, values: torch.Tensor, source: Tier) -> Arrival:
        """Starts replacing the elements from ``begin`` on by ``values``, which lie in memory of tier
        ``source``. The home itself knows to wait before it gives them out."""

    def read(self, begin: int, end: int) -> torch.Tensor:
        """The elements [begin, end): live memory where the tier is memory, else a copy. Not counted."""

    def run(self, begin: int, end: int) -> Values:
        """The elements [begin, end) where they lie."""

    def part(self, begin: int, end: int) -> ShardHome:
        """The elements [begin, end), which move as a shard of their own; both multiples of ``grain``, or the
        shard's end."""

    def memory(self, tier: Tier) -> torch.Tensor | None:
        """The shard itself if it lies in memory of ``tier``, for who can work on it there."""


class MemoryHome:
    """A shard in device or host memory."""

    grain = 1

    def __init__(
        self, tier: Tier, tensor: torch.Tensor, transfers: TransferLog, device: Device = CPU
    ) -> None:
        self.tier = tier
        self.numel = tensor.numel()
        self.dtype = tensor.dtype
        self._memory = tensor
        self._transfers = transfers
        self._device = device
        self._written: Arrival = HERE
        self._fetched: Arrival = HERE

    @property
    def _tensor(self) -> torch.Tensor:
        """The memory, once what is written to it is there and what is read from it was read."""
        self._fetched.let_go()
        self._fetched = HERE
        return self._readable()

    def _readable(self) -> torch.Tensor:
        self._written.wait()
        self._written = HERE
        return self._memory

    def fetch(self, into: torch.Tensor, begin: int = 0, target: Tier = "device") -> Arrival:
        """See :class:`ShardHome`."""
        source = self._readable()
        if begin or into.numel() != self.numel:
            source = source[begin : begin + into.numel()]
        if into.data_ptr() == source.data_ptr():
            return HERE
        self._transfers.record(self.tier, target, into.nbytes)
        # Copies in one direction end in order, so the last one stands for all.
        arrival = self._device.copy(into, source)
        if arrival is not HERE:
            self._fetched = arrival
        return arrival

    def store(self, begin: int, values: torch.Tensor, source: Tier) -> Arrival:
        """See :class:`ShardHome`; ``values`` of another dtype are there when it returns."""
        target = self._memory[begin : begin + values.numel()]
        if target.data_ptr() == values.data_ptr():
            return HERE
        self._transfers.record(source, self.tier, target.nbytes)
        if values.dtype != target.dtype or values.device == target.device:
            self._tensor[begin : begin + values.numel()].copy_(values)
            return HERE
        self._fetched.let_go()
        self._written = self._device.copy(target, values)
        return self._written

    def read(self, begin: int, end: int) -> torch.Tensor:
        """See :class:`ShardHome`."""
        return self._tensor[begin:end]

    def run(self, begin: int, end: int) -> Values:
        """See :class:`ShardHome`."""
        return self._tensor[begin:end]

    def part(self, begin: int, end: int) -> ShardHome:
        """See :class:`ShardHome`."""
        return MemoryHome(self.tier, self._tensor[begin:end], self._transfers, self._device)

    def memory(self, tier: Tier) -> torch.Tensor | None:
        """See :class:`ShardHome`."""
        return self._tensor if tier == self.tier else None


def put(home: ShardHome, begin: int, values: torch.Tensor, source: Tier) -> None:
    """Stores ``values``, which may be changed again when it returns; from the host, they are there then."""
    home.store(begin, values, source).let_go()


def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A zeroed flat tensor [numel] on the host's huge pages."""
    return CPU.allocate("host", numel, dtype)
