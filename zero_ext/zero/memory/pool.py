"""Reused buffers for gathered units, unreduced gradients and received shards."""

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
from zero_ext.offload import COMPLETED, CPU, CopyHandle, Device
from zero_ext.offload.extent_arena import ExtentArena
from zero_ext.zero.memory.pool_plan import PoolPlan, Purpose


class BufferPool:
    """One region of memory of a tier, from which exact extents are acquired and released.

    The region is allocated once, as ``plan`` says. If the planned offset of a buffer is in use, it gets
    another free extent. If there is none it gets overflow memory, reused by size, with one warning that names
    the unit. See ``docs/explanation/parameter_path.md`` for why the units do not simply resize their storage.
    """

    def __init__(self, plan: PoolPlan, device: Device = CPU, tier: Tier = "device") -> None:
        self.live_bytes = 0
        self.device = device
        self.overflow = OverflowBuffers(device, tier)
        self._tier, self._plan = tier, plan
        self._arena = ExtentArena(plan.nbytes)
        self._region = device.allocate(tier, plan.nbytes, torch.uint8)
        self._readers: list[tuple[int, int, CopyHandle]] = []  # released extents that a copy still reads
        self._warns = True
        self._blank: torch.Tensor | None = None

    @property
    def total_bytes(self) -> int:
        """Allocated bytes: the region and overflow buffers."""
        return self._plan.nbytes + self.overflow.total_bytes

    @property
    def high_water(self) -> int:
        """Bytes of the region that were ever in use, counted from its start."""
        return self._arena.high_water

    def acquire(self, nbytes: int, unit: str = "", purpose: Purpose = "gradient") -> torch.Tensor:
        """Return a uint8 buffer of exactly ``nbytes`` (at least 1), contents undefined."""
        offset = self._arena.allocate(nbytes, self._plan.offsets.get((unit, purpose), range(0)))
        self.live_bytes += extent_bytes(nbytes)
        if offset is not None:
            self._await_readers(offset, offset + extent_bytes(nbytes))
            # A forward in inference mode may be the one that acquires what training uses later.
            with torch.inference_mode(False):
                return _view_bytes(self._region, offset, nbytes)
        if self._warns:
            self._warns = False
            warnings.warn(
                f"unit '{unit}' needs {nbytes} bytes for its {purpose}, which {self._plan.nbytes} bytes of "
                "staging have not left: more is in use simultaneously than by a model that uses its "
                "parameters in the order of their registration, block by block. Staging grows for it; "
                "smaller 'units.prefetch_elements' and 'units.max_live_elements' bound what is gathered "
                "ahead.",
                RuntimeWarning,
                stacklevel=2,
            )
        return self.overflow.acquire(nbytes)

    def release(self, buffer: torch.Tensor, reader: CopyHandle = COMPLETED) -> None:
        """Release a buffer of :meth:`acquire`.

        Only the copy ``reader`` may still read it, and work that the reduction stream already has, if that is
        the current stream. The next user of the memory waits for these.
        """
        self.live_bytes -= extent_bytes(buffer.nbytes)
        if reader is COMPLETED and self._tier == "device":
            reader = self.device.reduction_stream.position()
        offset = buffer.data_ptr() - self._region.data_ptr()
        if 0 <= offset < self._region.nbytes:
            self._arena.release(offset)
            if reader is not COMPLETED:
                self._readers.append((offset, offset + extent_bytes(buffer.nbytes), reader))
        else:
            self.overflow.release(buffer, reader)

    def blank(self, nbytes: int) -> torch.Tensor:
        """Return a uint8 tensor [nbytes] that is NaN in every floating-point dtype, empty on an accelerator.

        Tensors that are used although their buffer was released show it.
        """
        if self.device.device.type != "cpu":
            return torch.empty(0, dtype=torch.uint8, device=self.device.device)
        if self._blank is None or self._blank.nbytes < nbytes:
            self._blank = ops.nan_filled_host_memory(nbytes)
        return _view_bytes(self._blank, 0, nbytes)

    def _await_readers(self, begin: int, end: int) -> None:
        readers, self._readers = self._readers, []
        for first, last, reader in readers:
            if first < end and begin < last:
                reader.wait_source()
            else:
                self._readers.append((first, last, reader))

    @contextlib.contextmanager
    def growing(self) -> Iterator[None]:
        """Return a context in which more than planned is acquired without a warning."""
        before, self._warns = self._warns, False
        try:
            yield
        finally:
            self._warns = before


class OverflowBuffers:
    """Buffers of exact sizes with memory of their own; idle ones are reused by size.

    At most the peak of the bytes in use stays allocated, and one buffer more. Idle buffers of other sizes are
    freed when a new one would exceed that.
    """

    def __init__(self, device: Device, tier: Tier) -> None:
        self._device = device
        self._tier: Tier = tier
        self._idle: dict[int, list[tuple[torch.Tensor, CopyHandle]]] = defaultdict(list)
        self._live_bytes = self._idle_bytes = self._most_live = self._largest = 0

    @property
    def total_bytes(self) -> int:
        """Allocated bytes, in use and idle."""
        return self._live_bytes + self._idle_bytes

    def acquire(self, nbytes: int) -> torch.Tensor:
        """Return a uint8 buffer of exactly ``nbytes``, its contents undefined."""
        self._live_bytes += nbytes
        self._most_live = max(self._most_live, self._live_bytes)
        self._largest = max(self._largest, nbytes)
        if self._idle[nbytes]:
            self._idle_bytes -= nbytes
            buffer, reader = self._idle[nbytes].pop()
            reader.wait_source()
            return buffer
        self._shrink(self._most_live + self._largest - self._live_bytes)
        return self._device.allocate(self._tier, nbytes, torch.uint8)

    def release(self, buffer: torch.Tensor, reader: CopyHandle = COMPLETED) -> None:
        """Release a buffer of :meth:`acquire`, which the copy ``reader`` may still read."""
        nbytes = buffer.nbytes
        self._live_bytes -= nbytes
        self._idle_bytes += nbytes
        # Most recently used last, so that the size used longest ago is freed first.
        self._idle[nbytes] = [*self._idle.pop(nbytes, []), (buffer, reader)]

    def release_idle(self) -> None:
        """Free what is not in use, and forget the peak."""
        self._shrink(0)
        self._most_live, self._largest = self._live_bytes, 0

    def _shrink(self, limit: int) -> None:
        for nbytes, buffers in self._idle.items():
            while buffers and self._idle_bytes > limit:
                buffer, reader = buffers.pop()
                reader.wait_source()
                self._device.reduction_stream.drop(buffer)
                self._idle_bytes -= nbytes


def _view_bytes(region: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
    """Return bytes of ``region`` as a tensor with a storage of its own, which :func:`attach` can swap."""
    # Through DLPack, whose tensors are no views and yet keep the memory they come from, on any device.
    view: torch.Tensor = torch.utils.dlpack.from_dlpack(torch._C._to_dlpack(region[offset : offset + nbytes]))
    return view


def attach(storage: torch.UntypedStorage, buffer: torch.Tensor) -> None:
    """Swap the memory of ``buffer`` into the blank ``storage``, keeping the storage object.

    Tensors that autograd saved as views of ``storage`` then see the new memory.
    """
    ops.swap_storages_(storage, buffer.untyped_storage())


def detach(storage: torch.UntypedStorage, buffer: torch.Tensor) -> None:
    """Undo :func:`attach`: ``storage`` is blank again and ``buffer`` has its memory back."""
    ops.swap_storages_(storage, buffer.untyped_storage())
