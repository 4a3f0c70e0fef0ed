"""Reused memory for what is whole only for a moment: gathered units, their gradients, received shards."""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.utils.dlpack

from zero_ext import ops
from zero_ext.config import Tier
from zero_ext.config.buffer_sizes import extent_bytes
from zero_ext.offload import CPU, HERE, Arrival, Device
from zero_ext.offload.extent_arena import ExtentArena
from zero_ext.zero.memory.pool_plan import PoolPlan, Purpose


class BufferPool:
    """One region of memory of a tier, of which exact extents are taken and given back.

    The region is allocated here as ``plan`` says, and never again. What finds its place taken gets another
    free one; what finds none gets memory beside the region, reused by size, with one warning naming who
    wanted it. See ``docs/design.md`` for why the units do not simply resize their storage.
    """

    def __init__(self, plan: PoolPlan, device: Device = CPU, tier: Tier = "device") -> None:
        self.live_bytes = 0
        self.device = device
        self.overflow = OverflowBuffers(device, tier)
        self._tier = tier
        self._plan = plan
        self._arena = ExtentArena(plan.nbytes)
        self._region = device.allocate(tier, plan.nbytes, torch.uint8)
        self._leaving: list[tuple[int, int, Arrival]] = []  # extents that were given back and are still read
        self._warns = True
        self._blank: torch.Tensor | None = None

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
            self._await_leaving(offset, offset + extent_bytes(nbytes))
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

    def give(self, buffer: torch.Tensor, leaving: Arrival = HERE) -> None:
        """Takes back a buffer handed out by :meth:`take`; nobody may use it any more, but for the copy
        ``leaving``, which the next one to use the memory comes after, and what the reduction stream was given
        so far, if it is the current one."""
        self.live_bytes -= extent_bytes(buffer.nbytes)
        if leaving is HERE and self._tier == "device":
            leaving = self.device.reduction_stream.position()
        offset = buffer.data_ptr() - self._region.data_ptr()
        if 0 <= offset < self._region.nbytes:
            self._arena.give(offset)
            if leaving is not HERE:
                self._leaving.append((offset, offset + extent_bytes(buffer.nbytes), leaving))
        else:
            self.overflow.give(buffer, leaving)

    def blank(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor [nbytes], NaN in every floating-point dtype, for what has no buffer: tensors that
        are used although their memory went back to the pool. Empty where the device is an accelerator."""
        if self.device.device.type != "cpu":
            return torch.empty(0, dtype=torch.uint8, device=self.device.device)
        if self._blank is None or self._blank.nbytes < nbytes:
            self._blank = ops.blank_host_memory(nbytes)
        return _part_of(self._blank, 0, nbytes)

    def _await_leaving(self, begin: int, end: int) -> None:
        stay = []
        for first, last, leaving in self._leaving:
            if first < end and begin < last:
                leaving.let_go()
            else:
                stay.append((first, last, leaving))
        self._leaving = stay

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

    def __init__(self, device: Device, tier: Tier) -> None:
        self._device = device
        self._tier: Tier = tier
        self._idle: dict[int, list[tuple[torch.Tensor, Arrival]]] = defaultdict(list)
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
            buffer, leaving = self._idle[nbytes].pop()
            leaving.let_go()
            return buffer
        self._shrink(self._most_live + self._largest - self._live_bytes)
        return self._device.allocate(self._tier, nbytes, torch.uint8)

    def give(self, buffer: torch.Tensor, leaving: Arrival = HERE) -> None:
        """Takes back a buffer handed out by :meth:`take`; see :meth:`BufferPool.give`."""
        nbytes = buffer.nbytes
        self._live_bytes -= nbytes
        self._idle_bytes += nbytes
        # Most recently used last, so that the size used longest ago is freed first.
        self._idle[nbytes] = [*self._idle.pop(nbytes, []), (buffer, leaving)]

    def _shrink(self, limit: int) -> None:
        for nbytes, buffers in self._idle.items():
            while buffers and self._idle_bytes > limit:
                buffer, leaving = buffers.pop()
                leaving.let_go()
                self._device.reduction_stream.drop(buffer)
                self._idle_bytes -= nbytes


def _part_of(region: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
    """Bytes of ``region`` as a tensor with a storage of its own, which :func:`attach` can swap."""
    # Through DLPack, whose tensors are no views and yet keep the memory they come from, on any device.
    part: torch.Tensor = torch.utils.dlpack.from_dlpack(torch._C._to_dlpack(region[offset : offset + nbytes]))
    return part


def attach(storage: torch.UntypedStorage, buffer: torch.Tensor) -> None:
    """Swaps the memory of ``buffer`` into the blank ``storage``, keeping the storage object.

    Tensors that autograd saved as views of ``storage`` then see the new memory.
    """
    ops.swap_storages_(storage, buffer.untyped_storage())


def detach(storage: torch.UntypedStorage, buffer: torch.Tensor) -> None:
    """The reverse of :func:`attach`: ``storage`` is blank again and ``buffer`` has its memory back."""
    ops.swap_storages_(storage, buffer.untyped_storage())
