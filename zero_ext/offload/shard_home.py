"""Where a rank's shard of a unit's parameters lives between uses."""

from __future__ import annotations

from typing import Protocol

import torch

from zero_ext import ops
from zero_ext.config import Tier
from zero_ext.offload.stored_run import Values
from zero_ext.offload.transfers import TransferLog

# Direct transfers to any device want memory, offset and length in multiples of this.
STORAGE_ALIGNMENT = 4096


class Arrival(Protocol):
    """Elements on their way."""

    def wait(self) -> None:
        """Blocks until they are there; raises ``RuntimeError`` if they cannot get there."""


class ShardHome(Protocol):
    """A shard [numel] of one dtype in one tier; it moves in multiples of ``grain`` elements."""

    tier: Tier
    numel: int
    dtype: torch.dtype
    grain: int

    def fetch(self, into: torch.Tensor, begin: int = 0, target: Tier = "device") -> Arrival:
        """Starts copying the elements from ``begin`` on into ``into`` [n], memory of tier ``target``; n is a
        multiple of ``grain``, also at the end of the shard."""

    def store(self, begin: int, values: torch.Tensor, source: Tier) -> None:
        """Replaces the elements from ``begin`` on by ``values``, which lie in memory of tier ``source``."""

    def read(self, begin: int, end: int) -> torch.Tensor:
        """The elements [begin, end): live memory where the tier is memory, else a copy. Not counted."""

    def run(self, begin: int, end: int) -> Values:
        """The elements [begin, end) where they lie."""

    def memory(self, tier: Tier) -> torch.Tensor | None:
        """The shard itself if it lies in memory of ``tier``, for who can work on it there."""


class MemoryHome:
    """A shard in device or host memory."""

    grain = 1

    def __init__(self, tier: Tier, tensor: torch.Tensor, transfers: TransferLog) -> None:
        self.tier = tier
        self.numel = tensor.numel()
        self.dtype = tensor.dtype
        self._tensor = tensor
        self._transfers = transfers

    def fetch(self, into: torch.Tensor, begin: int = 0, target: Tier = "device") -> Arrival:
        """See :class:`ShardHome`; done when it returns."""
        source = self._tensor[begin : begin + into.numel()]
        if into.data_ptr() != source.data_ptr():
            into.copy_(source)
            self._transfers.record(self.tier, target, into.nbytes)
        return _HERE

    def store(self, begin: int, values: torch.Tensor, source: Tier) -> None:
        """See :class:`ShardHome`."""
        target = self._tensor[begin : begin + values.numel()]
        if target.data_ptr() != values.data_ptr():
            target.copy_(values)
            self._transfers.record(source, self.tier, target.nbytes)

    def read(self, begin: int, end: int) -> torch.Tensor:
        """See :class:`ShardHome`."""
        return self._tensor[begin:end]

    def run(self, begin: int, end: int) -> Values:
        """See :class:`ShardHome`."""
        return self._tensor[begin:end]

    def memory(self, tier: Tier) -> torch.Tensor | None:
        """See :class:`ShardHome`."""
        return self._tensor if tier == self.tier else None


class _Here:
    def wait(self) -> None:
        """Nothing is under way."""


_HERE = _Here()


def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A zeroed flat tensor [numel] on huge pages, for state that lives as long as its model."""
    return ops.host_buffer(numel * dtype.itemsize).view(dtype)
