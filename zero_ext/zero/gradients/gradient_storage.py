"""Storage of a unit's reduced gradient shard from its reduction to the step, in device or host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch

from zero_ext import ops
from zero_ext.config import Tier
from zero_ext.offload import COMPLETED, CopyHandle, MemoryShard, ShardStorage, TransferStats
from zero_ext.zero.memory.pool import BufferPool


class Squares:
    """An exact sum of squares that does not depend on the order. Each device adds up its own values."""

    def __init__(self, *sums: torch.Tensor) -> None:
        """Add to ``sums``, int64 [:data:`zero_ext.ops.ACCUMULATOR_ENTRIES`], one per device at most."""
        self._sums = {each.device: each for each in sums}

    def add(self, values: torch.Tensor) -> None:
        """Add the squares of ``values`` [n] on their device, without waiting for it."""
        ops.squared_norm_(values, self._sum_on(values.device))

    def add_all(self, other: Squares) -> None:
        """Add another sum."""
        for device, sums in other._sums.items():
            self._sum_on(device).add_(sums)

    def count_non_finite(self) -> int:
        """Return how many of the values added were not finite; waits for the devices."""
        return int(self.total()[-1])

    def total(self) -> torch.Tensor:
        """Return the sum as an int64 superaccumulator in host memory, for
        :func:`zero_ext.ops.squared_norm_value`. Waits for the devices."""
        total = torch.zeros(ops.ACCUMULATOR_ENTRIES, dtype=torch.int64, device="cpu")
        for sums in self._sums.values():
            total += sums.cpu()
        return total

    def _sum_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._sums:
            self._sums[device] = torch.zeros(ops.ACCUMULATOR_ENTRIES, dtype=torch.int64, device=device)
        return self._sums[device]


class GradientStorage(Protocol):
    """Stores one reduced gradient [numel], or none. Further gradients are added to it.

    ``dtype`` is that of the stored gradient, or of the next one. Once a second gradient was added, or the sum
    of several was adopted, it is the accumulation dtype. Sizes of buffers for :meth:`adopt` are multiples of
    ``alignment``. ``is_async``: the copy is still in flight when :meth:`adopt` returns. ``failure`` is an
    error of the transfers, which reading raises.
    """

    tier: Tier
    alignment: int
    failure: RuntimeError | None

    @property
    def is_async(self) -> bool:
        """See above."""

    @property
    def dtype(self) -> torch.dtype:
        """See above."""

    @property
    def valid(self) -> bool:
        """Whether there is a gradient."""

    def begin_reduction(self, sums: bool = False) -> torch.Tensor | None:
        """Begin a reduction, of ``sums`` of several passes or not.

        Returns:
            Device memory [numel] to write the result to, or to add it to where ``valid``, before
            :meth:`complete_reduction`. None where the result is passed to :meth:`adopt` instead.
        """

    def complete_reduction(self) -> None:
        """Mark the memory that :meth:`begin_reduction` returned as written."""

    def adopt(self, buffer: torch.Tensor, dtype: torch.dtype) -> None:
        """Take ownership of a pool buffer whose first numel elements of ``dtype`` are the result."""

    def shard(self) -> ShardStorage:
        """Return the gradient as a shard in its tier."""

    def visit(self, begin: int, end: int) -> Iterator[torch.Tensor]:
        """Yield the elements [begin, end) in chunks, in any order. Each is valid until the next one."""

    def change(self, begin: int, end: int, change: Callable[[torch.Tensor], object]) -> None:
        """Apply the element-wise ``change`` in place to the elements [begin, end)."""

    def add_squares(self, squares: Squares) -> None:
        """Add the squares of all elements."""

    def wait_transfers(self) -> None:
        """Wait for all transfers that use memory of the pool."""

    def forget(self) -> None:
        """Discard the gradient and the failure."""

    def allocated_bytes(self) -> int:
        """Return the bytes allocated in ``tier`` between steps, without those of the pool."""


class MemoryGradientStorage:
    """A :class:`GradientStorage` in permanent device or host memory."""

    alignment = 1
    failure: RuntimeError | None = None

    def __init__(
        self,
        tier: Tier,
        tensor: torch.Tensor,
        accumulation_dtype: torch.dtype,
        pool: BufferPool,
        transfers: TransferStats,
        staging_buffers: BufferPool | None = None,
    ) -> None:
        self.tier = tier
        self.valid = False
        self._memory = tensor
        self._accumulation_dtype = accumulation_dtype
        self._pool = pool
        self._transfers = transfers
        # Host memory for a gradient that is copied from an accelerator and then added.
        self._staging_buffers = staging_buffers
        self._copy: CopyHandle = COMPLETED  # into ``_memory``
        self._pending_add: _PendingAdd | None = None  # of a staged gradient, or its cast

    @property
    def is_async(self) -> bool:
        """See :class:`GradientStorage`."""
        return self._memory.device != self._pool.device.device

    @property
    def dtype(self) -> torch.dtype:
        """See :class:`GradientStorage`."""
        return self._memory.dtype

    @property
    def _tensor(self) -> torch.Tensor:
        """Return the memory after all transfers and additions."""
        self.wait_transfers()
        self._copy.wait()
        self._copy = COMPLETED
        return self._memory

    def begin_reduction(self, sums: bool = False) -> torch.Tensor | None:
        """See :class:`GradientStorage`."""
        if (self.valid or sums) and self.dtype != self._accumulation_dtype:
            self._memory = self._copied()
        return self._memory if self.tier == "device" else None

    def complete_reduction(self) -> None:
        """See :class:`GradientStorage`."""
        self.valid = True

    def adopt(self, buffer: torch.Tensor, dtype: torch.dtype) -> None:
        """See :class:`GradientStorage`. The buffer is released to the pool."""
        self.wait_transfers()
        values = buffer.view(dtype)
        if not self.valid and dtype == self._accumulation_dtype != self.dtype:
            self._memory = self._allocate(dtype)  # an unannounced sum of passes
        self._transfers.record("device", self.tier, values.nbytes)
        if values.device == self._memory.device:
            _add_or_copy(self._memory, values, self.valid)
            self._pool.release(buffer)
        elif not self.valid and dtype == self.dtype:
            self._copy = self._pool.device.copy(self._memory, values)
            self._pool.release(buffer, self._copy)
        else:
            self._pool.release(buffer, self._stage(buffer, dtype))
        self.valid = True

    def shard(self) -> ShardStorage:
        """See :class:`GradientStorage`."""
        return MemoryShard(self.tier, self._tensor, self._transfers, self._pool.device)

    def visit(self, begin: int, end: int) -> Iterator[torch.Tensor]:
        """See :class:`GradientStorage`. Yield one chunk."""
        yield self._tensor[begin:end]

    def change(self, begin: int, end: int, change: Callable[[torch.Tensor], object]) -> None:
        """See :class:`GradientStorage`."""
        change(self._tensor[begin:end])

    def add_squares(self, squares: Squares) -> None:
        """See :class:`GradientStorage`."""
        squares.add(self._tensor)

    def wait_transfers(self) -> None:
        """See :class:`GradientStorage`."""
        if self._pending_add is not None:
            pending, self._pending_add = self._pending_add, None
            pending.copy.wait()
            self._copy.wait()
            _add_or_copy(self._memory, pending.buffer.view(pending.dtype), pending.adds)
            pending.pool.release(pending.buffer)

    def forget(self) -> None:
        """See :class:`GradientStorage`; the memory stays."""
        self.wait_transfers()
        self.valid = False

    def allocated_bytes(self) -> int:
        """See :class:`GradientStorage`."""
        return self._memory.nbytes

    def _stage(self, buffer: torch.Tensor, dtype: torch.dtype) -> CopyHandle:
        if self._staging_buffers is None:
            raise AssertionError("a gradient on an accelerator without a staging buffer in host memory")
        staging = self._staging_buffers.acquire(buffer.nbytes, purpose="staging")
        copy = self._pool.device.copy(staging, buffer)
        self._pending_add = _PendingAdd(self._staging_buffers, staging, dtype, copy, self.valid)
        return copy

    def _allocate(self, dtype: torch.dtype) -> torch.Tensor:
        if self.tier == "device":
            self._pool.device.reduction_stream.drop(self._memory)
        return self._pool.device.allocate(self.tier, self._memory.numel(), dtype)

    def _copied(self) -> torch.Tensor:
        return self._allocate(self._accumulation_dtype).copy_(self._tensor)


class _PendingAdd(NamedTuple):
    """A gradient that is copied to ``buffer`` of ``pool``, to be added to the stored one or to replace it."""

    pool: BufferPool
    buffer: torch.Tensor
    dtype: torch.dtype
    copy: CopyHandle
    adds: bool


def _add_or_copy(memory: torch.Tensor, values: torch.Tensor, adds: bool) -> None:
    (ops.accumulate_ if adds else ops.pack_)(memory, [values], [0])


class GradientSlice(MemoryGradientStorage):
    """A rank's slice of replicated gradients, or a separate copy while both are needed."""

    def __init__(
        self,
        full: torch.Tensor,
        begin: int,
        end: int,
        accumulation_dtype: torch.dtype,
        pool: BufferPool,
        transfers: TransferStats,
    ) -> None:
        super().__init__("device", full[begin:end], accumulation_dtype, pool, transfers)
        self._begin, self._end = begin, end

    def is_slice_of(self, full: torch.Tensor) -> bool:
        """Return whether the memory is a slice of ``full``."""
        return full.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()

    def become_slice_of(self, full: torch.Tensor) -> None:
        """Become a slice of ``full``, with its values."""
        self._memory = full[self._begin : self._end]

    def detach(self) -> None:
        """Move to separate memory with the same values."""
        self._memory = self._copied()


class PooledGradientStorage:
    """A :class:`GradientStorage` in pool memory, which it acquires for a reduction and releases in
    :meth:`forget`."""

    tier: Tier = "device"
    alignment = 1
    is_async = False
    failure: RuntimeError | None = None

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        accumulation_dtype: torch.dtype,
        pool: BufferPool,
        transfers: TransferStats,
    ) -> None:
        self.dtype = dtype
        self._numel = numel
        self._accumulation_dtype = accumulation_dtype
        self._pool = pool
        self._transfers = transfers
        self._buffer: torch.Tensor | None = None

    @property
    def valid(self) -> bool:
        """See :class:`GradientStorage`."""
        return self._buffer is not None

    def begin_reduction(self, sums: bool = False) -> torch.Tensor | None:
        """See :class:`GradientStorage`. Return memory only if there is a gradient to add to."""
        if self._buffer is None:
            return None
        if self.dtype != self._accumulation_dtype:
            narrow, buffer = self._tensor, self._buffer
            self.dtype = self._accumulation_dtype
            self._buffer = self._pool.acquire(self._numel * self.dtype.itemsize)
            ops.pack_(self._tensor, [narrow], [0])
            self._pool.release(buffer)
        return self._tensor

    def complete_reduction(self) -> None:
        """See :class:`GradientStorage`."""

    def adopt(self, buffer: torch.Tensor, dtype: torch.dtype) -> None:
        """See :class:`GradientStorage`. The buffer is stored itself if its dtype allows it."""
        if self._buffer is None and dtype in (self.dtype, self._accumulation_dtype):
            self._buffer, self.dtype = buffer, dtype
            return
        add = self._buffer is not None
        if self._buffer is None:
            self._buffer = self._pool.acquire(self._numel * self.dtype.itemsize)
        (ops.accumulate_ if add else ops.pack_)(self._tensor, [buffer.view(dtype)], [0])
        self._pool.release(buffer)

    def shard(self) -> ShardStorage:
        """See :class:`GradientStorage`; only while there is a gradient."""
        return MemoryShard(self.tier, self._tensor, self._transfers, self._pool.device)

    def visit(self, begin: int, end: int) -> Iterator[torch.Tensor]:
        """See :class:`GradientStorage`. Yield one chunk, none without a gradient."""
        if self._buffer is not None:
            yield self._tensor[begin:end]

    def change(self, begin: int, end: int, change: Callable[[torch.Tensor], object]) -> None:
        """See :class:`GradientStorage`; nothing happens without a gradient."""
        if self._buffer is not None:
            change(self._tensor[begin:end])

    def add_squares(self, squares: Squares) -> None:
        """See :class:`GradientStorage`."""
        squares.add(self._tensor)

    def wait_transfers(self) -> None:
        """See :class:`GradientStorage`. There are no transfers."""

    def forget(self) -> None:
        """See :class:`GradientStorage`. Release the memory to the pool."""
        if self._buffer is not None:
            self._pool.release(self._buffer)
            self._buffer = None

    def allocated_bytes(self) -> int:
        """See :class:`GradientStorage`: none."""
        return 0

    @property
    def _tensor(self) -> torch.Tensor:
        if self._buffer is None:
            raise AssertionError("no gradient is stored")
        return self._buffer.view(self.dtype)


class CopyInOrder:
    """Copies values into consecutive chunks of a range, from its beginning to its end."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def __call__(self, chunk: torch.Tensor) -> None:
        chunk.copy_(self._values[: chunk.numel()])
        self._values = self._values[chunk.numel() :]
