"""Where the reduced gradient of a unit's shard lives from its reduction to the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch

from zero_ext import ops
from zero_ext.config import Tier
from zero_ext.offload import HERE, Arrival, MemoryHome, ShardHome, TransferLog
from zero_ext.zero.gradients.squared_norms import Squares
from zero_ext.zero.memory.pool import BufferPool


class GradientHome(Protocol):
    """Keeps one reduced gradient [numel], or none. What comes while it keeps one is added to it.

    ``dtype`` is that of the kept gradient, or of the next one. Once a second gradient was added, or the sum
    of several was taken over, it is the dtype in which gradients add up. ``alignment`` is what the sizes of
    the buffers given to :meth:`take` are multiples of; ``is_late`` says that a gradient is still on its way
    when that returns. ``failure`` is why the gradient is not to be used; reading it raises that.
    """

    tier: Tier
    alignment: int
    failure: RuntimeError | None

    @property
    def is_late(self) -> bool:
        """See above."""

    @property
    def dtype(self) -> torch.dtype:
        """See above."""

    @property
    def valid(self) -> bool:
        """Whether there is a gradient."""

    def begin(self, sums: bool = False) -> torch.Tensor | None:
        """A reduction begins, of ``sums`` of several passes or not: device memory [numel] that its result
        goes into, or is added to where ``valid``, followed by :meth:`landed`; None where the home wants the
        result by :meth:`take`."""

    def landed(self) -> None:
        """The result lies in the memory that :meth:`begin` named."""

    def take(self, buffer: torch.Tensor, dtype: torch.dtype) -> None:
        """Takes over a buffer of the pool whose first numel elements of ``dtype`` are the result."""

    def shard(self) -> ShardHome:
        """The gradient where it lies."""

    def visit(self, begin: int, end: int) -> Iterator[torch.Tensor]:
        """The elements [begin, end) in pieces, in any order, each valid until the next is asked for."""

    def change(self, begin: int, end: int, change: Callable[[torch.Tensor], object]) -> None:
        """Applies the element-wise ``change``, in place, to the elements [begin, end)."""

    def add_squares(self, squares: Squares) -> None:
        """Adds the squares of all elements."""

    def settle(self) -> None:
        """Returns when nothing is under way that takes memory of the pool."""

    def forget(self) -> None:
        """There is no gradient, and no failure, any more."""

    def held_bytes(self) -> int:
        """Bytes held in ``tier`` from step to step; the pool's do not count."""


class MemoryGradients:
    """A gradient in device or host memory of its own for good: a :class:`GradientHome`."""

    alignment = 1
    failure: RuntimeError | None = None

    def __init__(
        self,
        tier: Tier,
        tensor: torch.Tensor,
        accumulation_dtype: torch.dtype,
        pool: BufferPool,
        transfers: TransferLog,
        landings: BufferPool | None = None,
    ) -> None:
        self.tier = tier
        self.valid = False
        self._memory = tensor
        self._accumulation_dtype = accumulation_dtype
        self._pool = pool
        self._transfers = transfers
        self._landings = landings  # host memory for what comes from an accelerator and is to be added
        self._arrival: Arrival = HERE  # of what is copied into ``_memory``
        self._landing: _Landing | None = None  # what is still to be added to it, or cast

    @property
    def is_late(self) -> bool:
        """See :class:`GradientHome`."""
        return self._memory.device != self._pool.device.device

    @property
    def dtype(self) -> torch.dtype:
        """See :class:`GradientHome`."""
        return self._memory.dtype

    @property
    def _tensor(self) -> torch.Tensor:
        """The memory with all that came."""
        self.settle()
        self._arrival.wait()
        self._arrival = HERE
        return self._memory

    def begin(self, sums: bool = False) -> torch.Tensor | None:
        """See :class:`GradientHome`."""
        if (self.valid or sums) and self.dtype != self._accumulation_dtype:
            self._memory = self._copied()
        return self._memory if self.tier == "device" else None

    def landed(self) -> None:
        """See :class:`GradientHome`."""
        self.valid = True

    def take(self, buffer: torch.Tensor, dtype: torch.dtype) -> None:
        """See :class:`GradientHome`; the pool has the buffer back when it returns."""
        self.settle()
        values = buffer.view(dtype)
        if not self.valid and dtype == self._accumulation_dtype != self.dtype:
            self._memory = self._allocate(dtype)  # a sum of passes that nobody announced
        self._transfers.record("device", self.tier, values.nbytes)
        if values.device == self._memory.device:
            _keep(self._memory, values, self.valid)
            self._pool.give(buffer)
        elif not self.valid and dtype == self.dtype:
            self._arrival = self._pool.device.copy(self._memory, values)
            self._pool.give(buffer, self._arrival)
        else:
            self._pool.give(buffer, self._land(buffer, dtype))
        self.valid = True

    def shard(self) -> ShardHome:
        """See :class:`GradientHome`."""
        return MemoryHome(self.tier, self._tensor, self._transfers, self._pool.device)

    def visit(self, begin: int, end: int) -> Iterator[torch.Tensor]:
        """See :class:`GradientHome`: one piece."""
        yield self._tensor[begin:end]

    def change(self, begin: int, end: int, change: Callable[[torch.Tensor], object]) -> None:
        """See :class:`GradientHome`."""
        change(self._tensor[begin:end])

    def add_squares(self, squares: Squares) -> None:
        """See :class:`GradientHome`."""
        squares.add(self._tensor)

    def settle(self) -> None:
        """See :class:`GradientHome`."""
        if self._landing is not None:
            landing, self._landing = self._landing, None
            landing.arrival.wait()
            self._arrival.wait()
            _keep(self._memory, landing.room.view(landing.dtype), landing.adds)
            landing.pool.give(landing.room)

    def forget(self) -> None:
        """See :class:`GradientHome`; the memory stays."""
        self.settle()
        self.valid = False

    def held_bytes(self) -> int:
        """See :class:`GradientHome`."""
        return self._memory.nbytes

    def _land(self, buffer: torch.Tensor, dtype: torch.dtype) -> Arrival:
        if self._landings is None:
            raise AssertionError("a gradient on an accelerator without a place to land in host memory")
        room = self._landings.take(buffer.nbytes, purpose="landing")
        arrival = self._pool.device.copy(room, buffer)
        self._landing = _Landing(self._landings, room, dtype, arrival, self.valid)
        return arrival

    def _allocate(self, dtype: torch.dtype) -> torch.Tensor:
        if self.tier == "device":
            self._pool.device.reduction_stream.drop(self._memory)
        return self._pool.device.allocate(self.tier, self._memory.numel(), dtype)

    def _copied(self) -> torch.Tensor:
        return self._allocate(self._accumulation_dtype).copy_(self._tensor)


class _Landing(NamedTuple):
    """A gradient on its way to ``room`` of ``pool``, then to be added to what is kept or to replace it."""

    pool: BufferPool
    room: torch.Tensor
    dtype: torch.dtype
    arrival: Arrival
    adds: bool


def _keep(memory: torch.Tensor, values: torch.Tensor, adds: bool) -> None:
    (ops.accumulate_ if adds else ops.pack_)(memory, [values], [0])


class SliceGradients(MemoryGradients):
    """A rank's slice of replicated gradients; apart from them while both must be kept."""

    def __init__(
        self,
        whole: torch.Tensor,
        begin: int,
        end: int,
        accumulation_dtype: torch.dtype,
        pool: BufferPool,
        transfers: TransferLog,
    ) -> None:
        super().__init__("device", whole[begin:end], accumulation_dtype, pool, transfers)
        self._begin, self._end = begin, end

    def part_of(self, whole: torch.Tensor) -> bool:
        """Whether it is a slice of ``whole`` now."""
        return whole.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()

    def to_slice_of(self, whole: torch.Tensor) -> None:
        """Is a slice of ``whole`` from now on, with the values that are there."""
        self._memory = whole[self._begin : self._end]

    def to_apart(self) -> None:
        """Has memory of its own from now on, with the same values."""
        self._memory = self._copied()


class BorrowedGradients:
    """A gradient in memory that the pool lends from its reduction until it is forgotten: a
    :class:`GradientHome`."""

    tier: Tier = "device"
    alignment = 1
    is_late = False
    failure: RuntimeError | None = None

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        accumulation_dtype: torch.dtype,
        pool: BufferPool,
        transfers: TransferLog,
    ) -> None:
        self.dtype = dtype
        self._numel = numel
        self._accumulation_dtype = accumulation_dtype
        self._pool = pool
        self._transfers = transfers
        self._buffer: torch.Tensor | None = None

    @property
    def valid(self) -> bool:
        """See :class:`GradientHome`."""
        return self._buffer is not None

    def begin(self, sums: bool = False) -> torch.Tensor | None:
        """See :class:`GradientHome`: memory once there is a gradient to be added to."""
        if self._buffer is None:
            return None
        if self.dtype != self._accumulation_dtype:
            narrow, buffer = self._tensor, self._buffer
            self.dtype = self._accumulation_dtype
            self._buffer = self._pool.take(self._numel * self.dtype.itemsize)
            ops.pack_(self._tensor, [narrow], [0])
            self._pool.give(buffer)
        return self._tensor

    def landed(self) -> None:
        """See :class:`GradientHome`."""

    def take(self, buffer: torch.Tensor, dtype: torch.dtype) -> None:
        """See :class:`GradientHome`: the buffer is kept where it can be."""
        if self._buffer is None and dtype in (self.dtype, self._accumulation_dtype):
            self._buffer, self.dtype = buffer, dtype
            return
        add = self._buffer is not None
        if self._buffer is None:
            self._buffer = self._pool.take(self._numel * self.dtype.itemsize)
        (ops.accumulate_ if add else ops.pack_)(self._tensor, [buffer.view(dtype)], [0])
        self._pool.give(buffer)

    def shard(self) -> ShardHome:
        """See :class:`GradientHome`; only while there is a gradient."""
        return MemoryHome(self.tier, self._tensor, self._transfers, self._pool.device)

    def visit(self, begin: int, end: int) -> Iterator[torch.Tensor]:
        """See :class:`GradientHome`: one piece, none without a gradient."""
        if self._buffer is not None:
            yield self._tensor[begin:end]

    def change(self, begin: int, end: int, change: Callable[[torch.Tensor], object]) -> None:
        """See :class:`GradientHome`; nothing happens without a gradient."""
        if self._buffer is not None:
            change(self._tensor[begin:end])

    def add_squares(self, squares: Squares) -> None:
        """See :class:`GradientHome`."""
        squares.add(self._tensor)

    def settle(self) -> None:
        """See :class:`GradientHome`: nothing ever is."""

    def forget(self) -> None:
        """See :class:`GradientHome`: the pool has its memory back."""
        if self._buffer is not None:
            self._pool.give(self._buffer)
            self._buffer = None

    def held_bytes(self) -> int:
        """See :class:`GradientHome`: none."""
        return 0

    @property
    def _tensor(self) -> torch.Tensor:
        if self._buffer is None:
            raise AssertionError("no gradient is kept")
        return self._buffer.view(self.dtype)


class Taken:
    """Gives pieces of a range, which come from its beginning to its end, the values that belong there."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def __call__(self, piece: torch.Tensor) -> None:
        piece.copy_(self._values[: piece.numel()])
        self._values = self._values[piece.numel() :]
