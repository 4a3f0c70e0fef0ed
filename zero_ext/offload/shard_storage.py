"""Shards of a unit's parameters and gradients between uses, in memory or on NVMe; counts of what moves."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from zero_ext import ops
from zero_ext.config.buffer_sizes import STORAGE_ALIGNMENT
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.config.tiers import Tier, share_memory
from zero_ext.offload.bounce_buffer import DeviceTransferPath
from zero_ext.offload.device_memory import CPU, Device
from zero_ext.offload.nvme.nvme_store import NvmeStore
from zero_ext.offload.side_stream import COMPLETED, CopyHandle


class StorageRange:
    """``numel`` consecutive values in storage, from ``begin`` on.

    ``read`` returns a copy of the values between two positions in storage. ``write`` replaces the values from
    a position on.
    """

    def __init__(
        self,
        begin: int,
        numel: int,
        dtype: torch.dtype,
        read: Callable[[int, int], torch.Tensor],
        write: Callable[[int, torch.Tensor], object],
    ) -> None:
        self.numel = numel
        self.dtype = dtype
        self._begin = begin
        self._read = read
        self._write = write

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return a copy of the values [begin, end) of the range."""
        return self._read(self._begin + begin, self._begin + end)

    def write(self, begin: int, values: torch.Tensor) -> None:
        """Replace the values of the range from ``begin`` on."""
        if values.numel():
            self._write(self._begin + begin, values)

    def subrange(self, begin: int, end: int) -> StorageRange:
        """Return the values [begin, end) as a range."""
        return StorageRange(self._begin + begin, end - begin, self.dtype, self._read, self._write)


Values = torch.Tensor | StorageRange  # a tensor is live memory, 1-D


def count(values: Values) -> int:
    """Return the number of values in a range."""
    return values.numel() if isinstance(values, torch.Tensor) else values.numel


def subrange_of(values: Values, begin: int, end: int) -> Values:
    """Return the values [begin, end) of a range, as a range."""
    return values[begin:end] if isinstance(values, torch.Tensor) else values.subrange(begin, end)


def copy_of(values: Values) -> torch.Tensor:
    """Return a copy of all values in a range."""
    return values.clone() if isinstance(values, torch.Tensor) else values.read(0, values.numel)


def replace(values: Values, by: torch.Tensor) -> None:
    """Replace all values in a range."""
    if isinstance(values, torch.Tensor):
        values.copy_(by)
    else:
        values.write(0, by.to(values.dtype).contiguous())


Route = tuple[Tier, Tier]  # from, to


@dataclass
class TransferStats:
    """Bytes this rank moved between tiers since :meth:`begin_step`, and in the last finished step.

    A byte counts once for every copy that an accelerator would need; memory that is used in place
    counts nothing. Storage counts what was asked of it, padding to its blocks included. Threads may record
    simultaneously.
    """

    moved: Counter[Route] = field(default_factory=Counter)
    last_moved: Counter[Route] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def record(self, source: Tier, target: Tier, nbytes: int) -> None:
        """Add one copy of ``nbytes`` bytes; none if both tiers are the same."""
        if source != target and nbytes:
            with self._lock:
                self.moved[source, target] += nbytes

    def begin_step(self) -> None:
        """Close the current step: its counts become ``last_moved`` and the running ones start at zero."""
        with self._lock:
            self.last_moved, self.moved = self.moved, Counter()

    def clear(self) -> None:
        """Drop the counts: setting a model up belongs to no step."""
        self.moved.clear()


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
        """Return the shard itself if steps use it in place of state in ``tier``, else None."""
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
        return self._tensor if share_memory(tier, self.tier) else None


def put(shard: ShardStorage, begin: int, values: torch.Tensor, source: Tier) -> None:
    """Store ``values``, which may be changed once it returns. Values from the host are stored by then."""
    shard.store(begin, values, source).wait_source()


def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a zeroed flat tensor [numel] on the host's huge pages."""
    return CPU.allocate("host", numel, dtype)


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
