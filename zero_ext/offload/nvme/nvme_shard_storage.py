"""A shard of parameters that lives on NVMe."""

from __future__ import annotations

import torch

from zero_ext import ops
from zero_ext.config import Tier
from zero_ext.config.buffer_sizes import STORAGE_ALIGNMENT
from zero_ext.offload.device.bounce_buffer import DeviceWay
from zero_ext.offload.device.side_stream import HERE, Arrival
from zero_ext.offload.nvme.nvme_store import NvmeStore
from zero_ext.offload.storage_range import StoredRun, Values
from zero_ext.offload.transfer_stats import TransferLog


class StoredHome:
    """A shard [numel] in one extent of the store: a :class:`ShardHome`.

    It is read straight into device memory where that is host memory, else by ``way``; nothing of it stays
    in memory.
    """

    tier: Tier = "nvme"

    def __init__(
        self,
        store: NvmeStore,
        offset: int,
        numel: int,
        dtype: torch.dtype,
        transfers: TransferLog,
        way: DeviceWay | None = None,
    ) -> None:
        self.numel = numel
        self.dtype = dtype
        self.grain = STORAGE_ALIGNMENT // dtype.itemsize
        self.offset = offset
        self._store = store
        self._transfers = transfers
        self._way = way

    def seen_as(self, dtype: torch.dtype) -> StoredHome:
        """The same extent as elements of another dtype, which must not be wider."""
        return StoredHome(self._store, self.offset, self.numel, dtype, self._transfers, self._way)

    def padded_bytes(self, numel: int) -> int:
        """Bytes of the whole blocks that ``numel`` elements take."""
        return -(-numel // self.grain) * STORAGE_ALIGNMENT

    def fetch(self, into: torch.Tensor, begin: int = 0, target: Tier = "device") -> Arrival:
        """See :class:`ShardHome`; ``begin`` is a multiple of ``grain``."""
        self._transfers.record("nvme", target, into.nbytes)
        first = self.offset + begin * self.dtype.itemsize
        if into.device.type == "cpu":
            return self._store.read(first, into)
        return self._way_there().read(into, lambda offset, chunk: self._store.read(first + offset, chunk))

    def write(self, values: torch.Tensor, begin: int) -> Arrival:
        """Starts to replace the elements from ``begin`` on, a multiple of ``grain``, by ``values`` of whole
        blocks in device memory, which must not change until it has ended."""
        self._transfers.record("device", "nvme", values.nbytes)
        first = self.offset + begin * self.dtype.itemsize
        if values.device.type == "cpu":
            return self._store.write(first, values)
        return self._way_there().write(values, lambda offset, chunk: self._store.write(first + offset, chunk))

    def store(self, begin: int, values: torch.Tensor, source: Tier) -> Arrival:
        """See :class:`ShardHome`; done when it returns. What shares a first or last block with the values is
        read and written back."""
        end = begin + values.numel()
        first, last, blocks = self._blocks(begin, end)
        whole = values
        fits = (first, last) == (begin, end) and values.dtype == self.dtype and values.is_contiguous()
        if not fits or values.device.type != "cpu" or values.data_ptr() % STORAGE_ALIGNMENT:
            whole = self._room(last - first)
            grain = STORAGE_ALIGNMENT // self.dtype.itemsize
            edges = {first} if first < begin else set()
            for edge in edges | ({last - grain} if end < last else set()):
                whole[edge - first : edge - first + grain].copy_(self._read(edge, edge + grain))
            whole[begin - first : end - first].copy_(values)
        self._store.write(self.offset + blocks, whole).wait()
        self._transfers.record(source, "nvme", whole.nbytes)
        return HERE

    def read(self, begin: int, end: int) -> torch.Tensor:
        """See :class:`ShardHome`: a copy."""
        first, last, _ = self._blocks(begin, end)
        return self._read(first, last)[begin - first : end - first]

    def run(self, begin: int, end: int) -> Values:
        """See :class:`ShardHome`."""
        return _ShardRun(self, begin, end - begin)

    def part(self, begin: int, end: int) -> StoredHome:
        """See :class:`ShardHome`."""
        offset = self.offset + begin * self.dtype.itemsize
        return StoredHome(self._store, offset, end - begin, self.dtype, self._transfers, self._way)

    def memory(self, tier: Tier) -> torch.Tensor | None:
        """See :class:`ShardHome`: never."""
        return None

    def _way_there(self) -> DeviceWay:
        if self._way is None:
            raise AssertionError("an accelerator's memory without a way to storage")
        return self._way

    def _blocks(self, begin: int, end: int) -> tuple[int, int, int]:
        """The elements of the whole blocks around [begin, end), and the bytes before them."""
        first = begin // self.grain * self.grain
        return first, -(-end // self.grain) * self.grain, first * self.dtype.itemsize

    def _room(self, numel: int) -> torch.Tensor:
        return ops.host_buffer(numel * self.dtype.itemsize).view(self.dtype)

    def _read(self, first: int, last: int) -> torch.Tensor:
        values = self._room(last - first)
        self._store.read(self.offset + first * self.dtype.itemsize, values).wait()
        return values


class _ShardRun:
    """A :class:`StoredRun` of a shard."""

    def __init__(self, home: StoredHome, begin: int, numel: int) -> None:
        self.numel = numel
        self.dtype = home.dtype
        self._home = home
        self._begin = begin

    def read(self, begin: int, end: int) -> torch.Tensor:
        return self._home.read(self._begin + begin, self._begin + end)

    def write(self, begin: int, values: torch.Tensor) -> None:
        self._home.store(self._begin + begin, values, "host").wait()

    def part(self, begin: int, end: int) -> StoredRun:
        return _ShardRun(self._home, self._begin + begin, end - begin)
