"""Reused memory for what is whole only for a moment: gathered units, their gradients, received shards."""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections import defaultdict
from collections.abc import Iterator

import torch

from zero_ext import ops
from zero_ext.zero.extent_arena import ExtentArena
from zero_ext.zero.pool_plan import PoolPlan, Purpose, extent_bytes


class BufferPool:
    """One region of huge pages, of which exact extents are taken and given back.

    The region is allocated here as ``plan`` says, and never again. What finds its place taken gets another
    free one; what finds none gets memory beside the region, reused by size, with one warning naming who
    wanted it. See ``docs/design.md`` for why the units do not simply resize their storage.
    """

    def __init__(self, plan: PoolPlan) -> None:
        self.live_bytes = 0
        self.overflow = OverflowBuffers()
        self._plan = plan
        self._arena = ExtentArena(plan.nbytes)
        with torch.inference_mode(False):
            self._region = ops.host_buffer(plan.nbytes)
        self._warns = True

    @property
    def total_bytes(self) -> int:
        """Bytes the pool holds: the region, and memory beside it."""
        return self._plan.nbytes + self.overflow.total_bytes

    @property
    def high_water(self) -> int:
        """Bytes of the region that were ever in use, counted from its start."""
        return self._arena.high_water

    def take(self, nbytes: int, unit: str = "", purpose: Purpose = "gradient") -> torch.Tensor:
        """A uint8 buffer of exactly ``nbytes`` (at least 1), contents undefined, for a unit's ``purpose``."""
        offset = self._arena.take(nbytes, self._plan.places.get((unit, purpose), range(0)))
        self.live_bytes += extent_bytes(nbytes)
        if offset is not None:
            with torch.inference_mode(False):
                return _part_of(self._region, offset, nbytes)
        if self._warns:
            self._warns = False
            warnings.warn(
                f"unit '{unit}' needs {nbytes} bytes for its {purpose}, which {self._plan.nbytes} bytes of "
                "staging have not left: more is in use at once than by a model that uses its parameters in "
                "the order of their registration, block by block. Staging grows for it; smaller "
                "'units.prefetch_elements' and 'units.live_elements' bound what is gathered ahead.",
                RuntimeWarning,
                stacklevel=2,
            )
        return self.overflow.take(nbytes)

    def give(self, buffer: torch.Tensor) -> None:
        """Takes back a buffer handed out by :meth:`take`; nobody may use it any more."""
        self.live_bytes -= extent_bytes(buffer.nbytes)
        offset = buffer.data_ptr() - self._region.data_ptr()
        if 0 <= offset < self._region.nbytes:
            self._arena.give(offset)
        else:
            self.overflow.give(buffer)

    @contextlib.contextmanager
    def growing(self) -> Iterator[None]:
        """Inside, more than was planned is taken, and no warning says so."""
        before, self._warns = self._warns, False
        try:
            yield
        finally:
            self._warns = before


class OverflowBuffers:
    """Buffers of exact sizes with memory of their own; idle ones are reused by size.

    At most what was in use at the busiest moment is kept, and one buffer more: idle buffers of other sizes
    are freed when a new one would go beyond that.
    """

    def __init__(self) -> None:
        self._idle: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._most_live = 0
        self._largest = 0
        self._live_bytes = 0
        self._idle_bytes = 0

    @property
    def total_bytes(self) -> int:
        """Bytes held: in use and idle."""
        return self._live_bytes + self._idle_bytes

    def take(self, nbytes: int) -> torch.Tensor:
        """A uint8 buffer of exactly ``nbytes``, its contents undefined."""
        self._live_bytes += nbytes
        self._most_live = max(self._most_live, self._live_bytes)
        self._largest = max(self._largest, nbytes)
        if self._idle[nbytes]:
            self._idle_bytes -= nbytes
            return self._idle[nbytes].pop()
        self._shrink(self._most_live + self._largest - self._live_bytes)
        with torch.inference_mode(False):  # the pool also lends buffers to training
            return ops.host_buffer(nbytes)

    def give(self, buffer: torch.Tensor) -> None:
        """Takes back a buffer handed out by :meth:`take`."""
        nbytes = buffer.nbytes
        self._live_bytes -= nbytes
        self._idle_bytes += nbytes
        # Most recently used last, so that the size used longest ago is freed first.
        self._idle[nbytes] = [*self._idle.pop(nbytes, []), buffer]

    def _shrink(self, limit: int) -> None:
        for nbytes, buffers in self._idle.items():
            while buffers and self._idle_bytes > limit:
                buffers.pop()
                self._idle_bytes -= nbytes


def _part_of(region: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
    """Bytes of ``region`` as a tensor with a storage of its own, which :func:`attach` can swap."""
    memory = (ctypes.c_char * nbytes).from_address(region.data_ptr() + offset)
    memory.region = region  # type: ignore[attr-defined]  # kept as long as the tensor
    return torch.frombuffer(memory, dtype=torch.uint8)


def attach(storage: torch.UntypedStorage, buffer: torch.Tensor) -> None:
    """Swaps the memory of ``buffer`` into the empty ``storage`` of equal size, keeping the storage object.

    Tensors that autograd saved as views of ``storage`` then see the new memory.
    """
    if hasattr(storage, "_swap_data_ptr_"):
        storage._swap_data_ptr_(buffer.untyped_storage())
    else:
        storage.resize_(buffer.nbytes)


def detach(storage: torch.UntypedStorage, buffer: torch.Tensor) -> None:
    """The reverse of :func:`attach`: ``storage`` is empty again and ``buffer`` has its memory back."""
    if hasattr(storage, "_swap_data_ptr_"):
        storage._swap_data_ptr_(buffer.untyped_storage())
    else:
        storage.resize_(0)
