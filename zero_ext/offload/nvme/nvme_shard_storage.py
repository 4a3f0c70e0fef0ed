"""A shard of parameters on NVMe."""

from __future__ import annotations

import torch

from zero_ext import ops
from zero_ext.config import Tier
from zero_ext.config.buffer_sizes import STORAGE_ALIGNMENT
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.offload.device.bounce_buffer import DeviceTransferPath
from zero_ext.offload.device.side_stream import COMPLETED, CopyHandle
from zero_ext.offload.nvme.nvme_store import NvmeStore
from zero_ext.offload.shard_storage import ShardStorage
from zero_ext.offload.transfer_stats import TransferStats


class NvmeShard(ShardStorage):
    """A shard [numel] in one extent of the store.

    It is read straight into device memory where that is host memory, else through ``transfer_path``. Nothing
    of it stays in memory.
    """

    tier: Tier = "nvme"

    def __init__(
        self,
        store: NvmeStore,
        offset: int,
        numel: int,
        dtype: torch.dtype,
        transfers: TransferStats,
        transfer_path: DeviceTransferPath | None = None,
    ) -> None:
        self.numel = numel
        self.dtype = dtype
        self.grain = STORAGE_ALIGNMENT // dtype.itemsize
        self.offset = offset
        self._store = store
        self._transfers = transfers
        self._transfer_path = transfer_path

    def with_dtype(self, dtype: torch.dtype) -> NvmeShard:
        """Return the same extent as elements of another dtype, which must not be wider."""
        return NvmeShard(self._store, self.offset, self.numel, dtype, self._transfers, self._transfer_path)

    def padded_bytes(self, numel: int) -> int:
        """Return the bytes of the padded blocks that ``numel`` elements take."""
        return -(-numel // self.grain) * STORAGE_ALIGNMENT

    def fetch(self, into: torch.Tensor, begin: int = 0, target: Tier = "device") -> CopyHandle:
        self._transfers.record("nvme", target, into.nbytes)
        first = self.offset + begin * self.dtype.itemsize
        if into.device.type == "cpu":
            return self._store.read(first, into)
        return self._path_to_device().read(
            into, lambda offset, chunk: self._store.read(first + offset, chunk)
        )

    def write(self, values: torch.Tensor, begin: int) -> CopyHandle:
        """Start to replace the elements from ``begin`` on, a multiple of ``grain``, by ``values`` of padded
        blocks in device memory, which must not change until it has ended."""
        self._transfers.record("device", "nvme", values.nbytes)
        first = self.offset + begin * self.dtype.itemsize
        if values.device.type == "cpu":
            return self._store.write(first, values)
        return self._path_to_device().write(
            values, lambda offset, chunk: self._store.write(first + offset, chunk)
        )

    def store(self, begin: int, values: torch.Tensor, source: Tier) -> CopyHandle:
        """Replace elements. They are stored when this returns.

        The rest of a first or last block is read and written back.
        """
        end = begin + values.numel()
        first, last, blocks = self._blocks(begin, end)
        padded = values
        fits = (first, last) == (begin, end) and values.dtype == self.dtype and values.is_contiguous()
        # Direct I/O needs whole blocks in aligned host memory. Everything else is assembled in a
        # buffer that meets both conditions.
        if not fits or values.device.type != "cpu" or values.data_ptr() % STORAGE_ALIGNMENT:
            padded = self._buffer(last - first)
            grain = self.grain
            edges = {first} if first < begin else set()
            for edge in edges | ({last - grain} if end < last else set()):
                padded[edge - first : edge - first + grain].copy_(self._read(edge, edge + grain))
            padded[begin - first : end - first].copy_(values)
        self._store.write(self.offset + blocks, padded).wait()
        self._transfers.record(source, "nvme", padded.nbytes)
        return COMPLETED

    def read(self, begin: int, end: int) -> torch.Tensor:
        first, last, _ = self._blocks(begin, end)
        return self._read(first, last)[begin - first : end - first]

    def subrange(self, begin: int, end: int) -> NvmeShard:
        offset = self.offset + begin * self.dtype.itemsize
        return NvmeShard(self._store, offset, end - begin, self.dtype, self._transfers, self._transfer_path)

    def _path_to_device(self) -> DeviceTransferPath:
        if self._transfer_path is None:
            raise zero_ext_bug("an accelerator's memory without a transfer path to storage")
        return self._transfer_path

    def _blocks(self, begin: int, end: int) -> tuple[int, int, int]:
        """Return the elements of the padded blocks around [begin, end), and the bytes before them."""
        first = begin // self.grain * self.grain
        return first, -(-end // self.grain) * self.grain, first * self.dtype.itemsize

    def _buffer(self, numel: int) -> torch.Tensor:
        return ops.host_buffer(numel * self.dtype.itemsize).view(self.dtype)

    def _read(self, first: int, last: int) -> torch.Tensor:
        values = self._buffer(last - first)
        self._store.read(self.offset + first * self.dtype.itemsize, values).wait()
        return values
