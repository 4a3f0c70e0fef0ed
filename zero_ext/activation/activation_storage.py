"""Storage of activations in one tier: extents allocated in forward and released after backward."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from zero_ext.config import Tier
from zero_ext.config.buffer_sizes import SLOTS, STORAGE_ALIGNMENT, extent_bytes
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.offload import COMPLETED, CopyHandle, Device, NvmeStore
from zero_ext.offload.bounce_buffer import BounceBuffer
from zero_ext.offload.extent_arena import ExtentArena

_BLOCK_BYTES = 16 << 20
_STORE_GROWTH_BYTES = 64 << 20

# Writes all bytes of memory on the device, uint8.
Fill = Callable[[torch.Tensor], object]


class BufferFullError(RuntimeError):
    """No space is left for the inputs of a checkpointed call."""


@dataclass
class _MemoryBlock:
    """One contiguous block of memory, and the arena of its extents."""

    memory: torch.Tensor
    arena: ExtentArena = field(init=False)
    live: int = 0

    def __post_init__(self) -> None:
        self.arena = ExtentArena(self.memory.nbytes)


@dataclass
class ActivationExtent:
    """An extent, the block of memory that it is in, if any, and the last transfer that fills and reads it."""

    offset: int
    nbytes: int
    block: _MemoryBlock | None = None
    written: CopyHandle = COMPLETED
    fetched: CopyHandle = COMPLETED

    @cached_property
    def memory(self) -> torch.Tensor:
        """Its bytes in the block."""
        return _block(self).memory[self.offset : self.offset + self.nbytes]

    def wait_unused(self) -> None:
        """Return when nothing uses the extent any more, whether its transfers succeeded or failed."""
        # Not wait_source: the source may be free while storage is still writing.
        with contextlib.suppress(RuntimeError):
            self.written.wait()
        self.fetched.wait_source()


class ActivationStorage(ABC):
    """Extents of bytes in one tier.

    Extents passed to :meth:`release` are free at the next allocation. Any thread may call it, even inside a
    finalizer, when it drops a graph.
    """

    tier: Tier
    block: int  # bytes of which extents and transfers are multiples

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: deque[ActivationExtent] = deque()
        self._writes: deque[CopyHandle] = deque()

    @abstractmethod
    def put(self, nbytes: int, fill: Fill) -> ActivationExtent:
        """Start to store ``nbytes`` that ``fill`` writes.

        The source stays on the device until two more were put, or until :meth:`release_sources`.
        """

    def release_sources(self, but: int = 0) -> None:
        """Wait until nothing that was put needs its memory on the device, ``but`` the newest ones."""
        while len(self._writes) > but:
            self._writes.popleft().wait_source()

    def fetch(self, extent: ActivationExtent, into: torch.Tensor) -> CopyHandle:
        """Start to copy an extent's bytes to ``into``, uint8 on the device."""
        self.release_sources()
        extent.written.wait()
        extent.fetched = self._read(extent, into)
        return extent.fetched

    def release(self, extent: ActivationExtent) -> None:
        """Free the extent."""
        self._free.append(extent)

    def used_bytes(self) -> int:
        """Return the bytes of the extents in use."""
        self._collect()
        return self._live_bytes()

    @abstractmethod
    def allocated_bytes(self) -> dict[Tier, int]:
        """Return the bytes allocated in each tier, in use or not."""

    @abstractmethod
    def _read(self, extent: ActivationExtent, into: torch.Tensor) -> CopyHandle: ...

    @abstractmethod
    def _live_bytes(self) -> int: ...

    @abstractmethod
    def _free_extent(self, extent: ActivationExtent) -> None: ...

    def _collect(self) -> None:
        while self._free:
            extent = self._free.popleft()
            extent.wait_unused()
            self._free_extent(extent)


class MemoryActivationStorage(ActivationStorage):
    """An :class:`ActivationStorage` in device or host memory, in blocks that are allocated once and reused.

    With ``calls`` it is one block of so many times the first extent. Else it grows, and empty blocks are
    freed before it does, so sizes that change from step to step leave no holes.
    """

    block = 64

    def __init__(self, tier: Tier, device: Device, calls: int | None = None) -> None:
        super().__init__(device)
        self.tier = tier
        self._calls = calls
        self._blocks: list[_MemoryBlock] = []

    def put(self, nbytes: int, fill: Fill) -> ActivationExtent:
        """See :class:`ActivationStorage`."""
        extent = self._allocate(nbytes)
        memory = data = extent.memory
        try:
            if memory.device != self._device.device:  # else no byte is copied twice
                data = torch.empty(nbytes, dtype=torch.uint8, device=self._device.device)
            fill(data)
        except BaseException:
            self.release(extent)
            raise
        if data is not memory:
            extent.written = self._device.copy(memory, data)
            # The copy's source stays alive with its handle for two calls: by then the copy has ended.
            self._writes.append(extent.written)
            self.release_sources(2)
        return extent

    def allocated_bytes(self) -> dict[Tier, int]:
        """See :class:`ActivationStorage`."""
        return {self.tier: sum(block.memory.nbytes for block in self._blocks)}

    def _read(self, extent: ActivationExtent, into: torch.Tensor) -> CopyHandle:
        return self._device.copy(into, extent.memory)

    def _live_bytes(self) -> int:
        return sum(block.live for block in self._blocks)

    def _free_extent(self, extent: ActivationExtent) -> None:
        block = _block(extent)
        block.arena.release(extent.offset)
        block.live -= extent_bytes(extent.nbytes)

    def _allocate(self, nbytes: int) -> ActivationExtent:
        self._collect()
        for block in (*self._blocks, None):
            block = block or self._grow(nbytes)
            offset = block.arena.allocate(nbytes)
            if offset is not None:
                block.live += extent_bytes(nbytes)
                return ActivationExtent(offset, nbytes, block)
        raise zero_ext_bug(f"{nbytes} bytes do not fit into a new block")

    def _grow(self, nbytes: int) -> _MemoryBlock:
        wanted = max(extent_bytes(nbytes), _BLOCK_BYTES)
        if self._calls is not None:
            if self._blocks:
                raise BufferFullError(
                    "activation_checkpointing.number_checkpoints: the buffer of "
                    f"{self._blocks[0].memory.nbytes} bytes for {self._calls} calls stores "
                    f"{self._blocks[0].live} and has no space for {nbytes} more. Raise number_checkpoints to "
                    "the calls of all forward passes before their backward (it counts calls of the first "
                    "one's size), or set contiguous_memory_optimization to false."
                )
            wanted = self._calls * extent_bytes(nbytes)
        self._blocks = [block for block in self._blocks if block.live]
        self._blocks.append(_MemoryBlock(self._device.allocate(self.tier, wanted, torch.uint8)))
        return self._blocks[-1]


class NvmeActivationStorage(ActivationStorage):
    """An :class:`ActivationStorage` in ``store``.

    Bytes pass through chunks of pinned host memory, ``buffer_bytes`` in all.
    """

    tier: Tier = "nvme"
    block = STORAGE_ALIGNMENT

    def __init__(self, store: NvmeStore, device: Device, buffer_bytes: int) -> None:
        super().__init__(device)
        grain = 2 * SLOTS * STORAGE_ALIGNMENT
        self._bounce_buffer = BounceBuffer(device, max(buffer_bytes // grain, 1) * grain)
        self._store = store
        self._used = 0

    def put(self, nbytes: int, fill: Fill) -> ActivationExtent:
        """See :class:`ActivationStorage`."""
        data = torch.empty(nbytes, dtype=torch.uint8, device=self._device.device)
        fill(data)
        self._collect()
        facts = self._store.facts()
        if facts.largest_free < nbytes:
            self._store.reserve(facts.capacity + max(nbytes, _STORE_GROWTH_BYTES), zeros=False)
        extent = ActivationExtent(first := self._store.allocate(nbytes), nbytes)
        self._used += nbytes
        extent.written = self._bounce_buffer.write(
            data, lambda offset, chunk: self._store.write(first + offset, chunk)
        )
        # What leaves an accelerator goes on to storage while the next call computes.
        self._writes.append(extent.written)
        self.release_sources(1 if self._device.is_accelerator else 0)
        return extent

    def allocated_bytes(self) -> dict[Tier, int]:
        """See :class:`ActivationStorage`."""
        return {"nvme": self._store.facts().capacity, "host": self._bounce_buffer.nbytes}

    def _read(self, extent: ActivationExtent, into: torch.Tensor) -> CopyHandle:
        first = extent.offset
        return self._bounce_buffer.read(into, lambda offset, chunk: self._store.read(first + offset, chunk))

    def _live_bytes(self) -> int:
        return self._used

    def _free_extent(self, extent: ActivationExtent) -> None:
        self._used -= extent.nbytes
        self._store.release(extent.offset)


def _block(extent: ActivationExtent) -> _MemoryBlock:
    if extent.block is None:
        raise zero_ext_bug("expected an extent in memory, got one in NVMe storage")
    return extent.block
