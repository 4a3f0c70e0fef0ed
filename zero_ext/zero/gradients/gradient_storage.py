"""Storage of a reduced gradient shard, in device or host memory, and counts of how gradients change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from zero_ext import ops
from zero_ext.config import Tier
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.offload import COMPLETED, CopyHandle, MemoryShard, ShardStorage, TransferStats
from zero_ext.zero.memory.pool import BufferPool

# Memory of a gradient stays allocated, is acquired from the pool while there is a gradient, or belongs to
# another tensor.
Lifetime = Literal["permanent", "pooled", "alias"]


@dataclass
class GradientGeneration:
    """Counts the changes of a model's gradients. A cache stores the counts that it was computed at.

    Direct writes of the user to a full gradient are not counted. The engine therefore counts one write each
    time that it synchronizes the gradients.
    """

    received: int = 0  # gradients that backward has brought
    writes: int = 0  # changes of reduced gradients outside reductions, such as clipping
    # Ends of backward passes and of steps, and clearings of all gradients. The ranks have to agree on their
    # gradients again after each.
    rounds: int = 0

    @property
    def of_values(self) -> tuple[int, int, int]:
        """The counts that the values of the reduced gradients depend on."""
        return self.received, self.writes, self.rounds

    @property
    def of_agreement(self) -> tuple[int, int]:
        """The counts that an agreement of the ranks on their gradients depends on."""
        return self.received, self.rounds


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
    """Stores one reduced gradient [numel], or none. Further gradients are added to it."""

    tier: Tier
    # Of the stored gradient, or of the next one: the accumulation dtype as soon as a second gradient was
    # added, or the sum of several was adopted.
    dtype: torch.dtype
    valid: bool = False  # whether there is a gradient
    alignment: int = 1  # sizes of buffers for ``adopt`` are multiples of it
    is_async: bool = False  # the copy is still in flight when ``adopt`` returns
    failure: RuntimeError | None = None  # of the transfers, raised by reading

    def begin_reduction(self, sums: bool = False) -> torch.Tensor | None:
        """Begin a reduction, of ``sums`` of several passes or not. Returns device memory [numel] to write the
        result to, or to add it to where ``valid``, before :meth:`complete_reduction`. None where the result
        is passed to :meth:`adopt` instead."""

    def complete_reduction(self) -> None:
        """Mark the memory that :meth:`begin_reduction` returned as written."""
        self.valid = True

    def adopt(self, buffer: torch.Tensor, dtype: torch.dtype) -> None:
        """Take ownership of a pool buffer with the result in its first numel elements of ``dtype``."""

    def shard(self) -> ShardStorage:
        """Return the gradient as a shard in its tier."""

    def device_memory(self) -> torch.Tensor | None:
        """Return the gradient if it is in memory of the device, else None."""
        return None

    def visit(self, begin: int, end: int) -> Iterator[torch.Tensor]:
        """Yield the elements [begin, end) in chunks, in order. Each is valid until the next one."""

    def change(self, begin: int, end: int, change: Callable[[torch.Tensor], object]) -> None:
        """Apply ``change`` in place to the elements [begin, end), in chunks, in order."""
        for values in self.visit(begin, end):
            change(values)

    def add_squares(self, squares: Squares) -> None:
        """Add the squares of all elements."""

    def wait_transfers(self) -> None:
        """Wait for all transfers that use memory of the pool."""

    def forget(self) -> None:
        """Discard the gradient and the failure."""

    def allocated_bytes(self) -> int:
        """Return the bytes allocated in ``tier`` between steps, without those of the pool and of aliases."""


class MemoryGradientStorage(GradientStorage):
    """One gradient in device or host memory of any :data:`Lifetime`, visited as one chunk.

    "permanent" memory is allocated here. "pooled" memory is acquired for a gradient and released in
    :meth:`forget`; there is nothing to visit in between. An "alias" needs :meth:`alias` before it is used.
    Widening gives it memory of its own.
    """

    def __init__(
        self,
        tier: Tier,
        numel: int,
        dtype: torch.dtype,
        accumulation_dtype: torch.dtype,
        pool: BufferPool,
        staging_buffers: BufferPool,
        transfers: TransferStats,
        lifetime: Lifetime = "permanent",
    ) -> None:
        """``staging_buffers``: host memory for a gradient that is copied from an accelerator, then added."""
        self.tier, self.dtype, self.lifetime = tier, dtype, lifetime
        self.is_async = pool.device.torch_device(tier) != pool.device.device
        self._numel, self._accumulation_dtype, self._pool = numel, accumulation_dtype, pool
        self._staging_buffers, self._transfers = staging_buffers, transfers
        # Either of ``dtype`` or bytes of the pool.
        self._memory = pool.device.allocate(tier, numel, dtype) if lifetime == "permanent" else None
        self._copy: CopyHandle = COMPLETED  # into ``_memory``
        self._pending_add: _PendingAdd | None = None

    def begin_reduction(self, sums: bool = False) -> torch.Tensor | None:
        """Return the memory, if it is the device's and allocated."""
        if self.valid or sums:
            self._widen()
        return self._view() if self.tier == "device" and self._memory is not None else None

    def adopt(self, buffer: torch.Tensor, dtype: torch.dtype) -> None:
        """Store the buffer itself as pooled memory, or copy or add it to the memory and release it."""
        # Only one addition can be pending. It also has to come first, as sums keep their order.
        self.wait_transfers()
        if dtype == self._accumulation_dtype:
            self._widen()
        values = buffer.view(dtype)
        self._transfers.record("device", self.tier, values.nbytes)
        replaces = not self.valid and dtype == self.dtype
        if replaces and self.lifetime == "pooled":
            self._memory = buffer
        elif not self.is_async:
            if self._memory is None:
                self._allocate()
            _add_or_copy(self._view(), values, self.valid)
            self._pool.release(buffer)
        elif replaces:
            self._copy = self._pool.device.copy(self._view(), values)
            # The next user of the buffer waits for the copy. The host does not wait here.
            self._pool.release(buffer, self._copy)
        else:
            staging = self._staging_buffers.acquire(buffer.nbytes, purpose="staging")
            copy = self._pool.device.copy(staging, buffer)
            self._pending_add = _PendingAdd(staging, dtype, copy, self.valid)
            self._pool.release(buffer, copy)
        self.valid = True

    def shard(self) -> ShardStorage:
        return MemoryShard(self.tier, self._finished(), self._transfers, self._pool.device)

    def device_memory(self) -> torch.Tensor | None:
        """Return the memory if it is the device's and allocated, whether there is a gradient or not."""
        return None if self.is_async or self._memory is None else self._finished()

    def visit(self, begin: int, end: int) -> Iterator[torch.Tensor]:
        if self._memory is not None:
            yield self._finished()[begin:end]

    def add_squares(self, squares: Squares) -> None:
        squares.add(self._finished())

    def wait_transfers(self) -> None:
        """Add a gradient that was staged."""
        if self._pending_add is not None:
            pending, self._pending_add = self._pending_add, None
            pending.copy.wait()
            # The first gradient may still be on its way into the memory that is added to.
            self._copy.wait()
            _add_or_copy(self._view(), pending.staging.view(pending.dtype), pending.adds)
            self._staging_buffers.release(pending.staging)

    def forget(self) -> None:
        """Discard the gradient. Pooled memory is released, other memory stays."""
        # A pending addition holds a staging buffer, also where its result is discarded.
        self.wait_transfers()
        self.valid = False
        if self.lifetime == "pooled" and self._memory is not None:
            self._pool.release(self._memory)
            self._memory = None

    def allocated_bytes(self) -> int:
        return self._view().nbytes if self.lifetime == "permanent" else 0

    def alias(self, memory: torch.Tensor) -> None:
        """Become an alias of ``memory`` [numel], with its values."""
        self.lifetime, self._memory, self.dtype = "alias", memory, memory.dtype

    def reallocate(self) -> None:
        """Move to new memory of the accumulation dtype, with the values of a gradient. An alias detaches."""
        old, values = self._memory, None if self._memory is None else self._finished()
        self.dtype = self._accumulation_dtype
        if old is None or values is None:
            return  # pooled memory, which is acquired later
        self._allocate()
        if self.valid:
            _add_or_copy(self._view(), values, False)
        if self.lifetime == "pooled":
            self._pool.release(old)

    def _widen(self) -> None:
        if self.dtype != self._accumulation_dtype:
            self.reallocate()

    def _allocate(self) -> None:
        if self.lifetime == "pooled":
            self._memory = self._pool.acquire(self._numel * self.dtype.itemsize)
            return
        if self.tier == "device" and self._memory is not None:
            # The caller may run in the reduction stream, in which the old memory is still read.
            self._pool.device.reduction_stream.drop(self._memory)
        self.lifetime = "permanent"
        self._memory = self._pool.device.allocate(self.tier, self._numel, self.dtype)

    def _view(self) -> torch.Tensor:
        """Return the memory, which transfers may still use."""
        if self._memory is None:
            raise zero_ext_bug("no gradient is stored")
        return self._memory.view(self.dtype)

    def _finished(self) -> torch.Tensor:
        """Return the memory after all transfers and additions."""
        self.wait_transfers()
        self._copy.wait()
        self._copy = COMPLETED
        return self._view()


class _PendingAdd(NamedTuple):
    """A gradient that is copied to the buffer ``staging``, to be added to the stored one or to replace it."""

    staging: torch.Tensor
    dtype: torch.dtype
    copy: CopyHandle
    adds: bool


def _add_or_copy(memory: torch.Tensor, values: torch.Tensor, adds: bool) -> None:
    (ops.accumulate_ if adds else ops.pack_)(memory, [values], [0])


class CopyInOrder:
    """Copies values into consecutive chunks of a range, from its beginning to its end."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def __call__(self, chunk: torch.Tensor) -> None:
        chunk.copy_(self._values[: chunk.numel()])
        self._values = self._values[chunk.numel() :]
