"""Storage of activations in one tier: extents allocated in forward and released after backward."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

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
class ActivationExtent:
    """An extent, the memory that it is in, if any, and the last transfer that fills and reads it."""

    offset: int
    nbytes: int
    memory: torch.Tensor | None = None
    block: _MemoryBlock | None = None
    written: CopyHandle = COMPLETED
    fetched: CopyHandle = COMPLETED

    def wait_unused(self) -> None:
        """Return when nothing uses the extent any more, whether its transfers succeeded or failed."""
        # Not wait_source: the source may be free while storage is still writing.
        with contextlib.suppress(RuntimeError):
            self.written.wait()
        self.fetched.wait_source()


class ActivationStorage(Protocol):
    """Extents of bytes in one tier.

    Extents passed to :meth:`release` are free at the next allocation. Any thread may call it, even inside a
    finalizer, when it drops a graph.
    """

    tier: Tier
    block: int  # bytes of which extents and transfers are multiples

    def put(self, nbytes: int, fill: Fill) -> ActivationExtent:
        """Start to store ``nbytes`` that ``fill`` writes.

        The source stays on the device until two more were put, or until :meth:`release_sources`.
        """

    def release_sources(self) -> None:
        """Wait until nothing that was put needs its memory on the device."""

    def fetch(self, extent: ActivationExtent, into: torch.Tensor) -> CopyHandle:
        """Start to copy an extent's bytes to ``into``, uint8 on the device."""

    def release(self, extent: ActivationExtent) -> None:
        """Free the extent."""

    def used_bytes(self) -> int:
        """Return the bytes of the extents in use."""

    def allocated_bytes(self) -> dict[Tier, int]:
        """Return the bytes allocated in each tier, in use or not."""


@dataclass
class _MemoryBlock:
    """One contiguous block of memory, and the arena of its extents."""

    memory: torch.Tensor
    arena: ExtentArena = field(init=False)
    live: int = 0

    def __post_init__(self) -> None:
        self.arena = ExtentArena(self.memory.nbytes)


class MemoryActivationStorage:
    """An :class:`ActivationStorage` in device or host memory, in blocks that are allocated once and reused.

    With ``calls`` it is one block of so many times the first extent. Else it grows, and empty blocks are
    freed before it does, so sizes that change from step to step leave no holes.
    """

    block = 64

    def __init__(self, tier: Tier, device: Device, calls: int | None = None) -> None:
        self.tier: Tier = tier
        self._device = device
        self._calls = calls
        self._blocks: list[_MemoryBlock] = []
        self._free: deque[ActivationExtent] = deque()
        self._copies: deque[CopyHandle] = deque()

    def put(self, nbytes: int, fill: Fill) -> ActivationExtent:
        """See :class:`ActivationStorage`."""
        extent = self._allocate(nbytes)
        memory = _memory(extent)
        try:
            data = self._filled(memory, fill)
        except BaseException:
            self.release(extent)
            raise
        if data is memory:
            return extent
        extent.written = self._device.copy(memory, data)
        # The copy's source stays alive with its handle for two calls: by then the copy has ended.
        self._copies.append(extent.written)
        _release_sources(self._copies, 2)
        return extent

    def release_sources(self) -> None:
        """See :class:`ActivationStorage`."""
        _release_sources(self._copies)

    def fetch(self, extent: ActivationExtent, into: torch.Tensor) -> CopyHandle:
        """See :class:`ActivationStorage`."""
        self.release_sources()
        extent.written.wait()
        extent.fetched = self._device.copy(into, _memory(extent))
        return extent.fetched

    def release(self, extent: ActivationExtent) -> None:
        """See :class:`ActivationStorage`."""
        self._free.append(extent)

    def used_bytes(self) -> int:
        """See :class:`ActivationStorage`."""
        self._collect()
        return sum(block.live for block in self._blocks)

    def allocated_bytes(self) -> dict[Tier, int]:
        """See :class:`ActivationStorage`."""
        return {self.tier: sum(block.memory.nbytes for block in self._blocks)}

    def _filled(self, memory: torch.Tensor, fill: Fill) -> torch.Tensor:
        """``memory`` itself where it is the device's: no byte is copied twice there."""
        data = memory
        if memory.device != self._device.device:
            data = torch.empty(memory.nbytes, dtype=torch.uint8, device=self._device.device)
        fill(data)
        return data

    def _allocate(self, nbytes: int) -> ActivationExtent:
        self._collect()
        for block in self._blocks:
            offset = block.arena.allocate(nbytes)
            if offset is not None:
                return _extent_in(block, offset, nbytes)
        block = self._grow(nbytes)
        offset = block.arena.allocate(nbytes)
        if offset is None:
            raise zero_ext_bug(f"{nbytes} bytes do not fit into a new block of {block.memory.nbytes}")
        return _extent_in(block, offset, nbytes)

    def _grow(self, nbytes: int) -> _MemoryBlock:
        wanted = max(extent_bytes(nbytes), _BLOCK_BYTES)
        if self._calls is not None:
            if self._blocks:
                raise BufferFullError(self._full(nbytes))
            wanted = self._calls * extent_bytes(nbytes)
        self._blocks = [block for block in self._blocks if block.live]
        self._blocks.append(_MemoryBlock(self._device.allocate(self.tier, wanted, torch.uint8)))
        return self._blocks[-1]

    def _full(self, nbytes: int) -> str:
        held, live = self._blocks[0].memory.nbytes, self._blocks[0].live
        return (
            f"activation_checkpointing.number_checkpoints: the buffer of {held} bytes for {self._calls} "
            f"calls stores {live} and has no space for {nbytes} more. Raise number_checkpoints to the "
            "calls of all forward passes before their backward (it counts calls of the first "
            "one's size), or set contiguous_memory_optimization to false."
        )

    def _collect(self) -> None:
        while self._free:
            extent = self._free.popleft()
            extent.wait_unused()
            block = extent.block
            if block is None:
                raise zero_ext_bug("an extent in memory without its block")
            block.arena.release(extent.offset)
            block.live -= extent_bytes(extent.nbytes)


class NvmeActivationStorage:
    """An :class:`ActivationStorage` in ``store``.

    Bytes pass through chunks of pinned host memory, ``buffer_bytes`` in all.
    """

    tier: Tier = "nvme"
    block = STORAGE_ALIGNMENT

    def __init__(self, store: NvmeStore, device: Device, buffer_bytes: int) -> None:
        grain = 2 * SLOTS * STORAGE_ALIGNMENT
        self._bounce_buffer = BounceBuffer(device, max(buffer_bytes // grain, 1) * grain)
        self._store = store
        self._device = device
        self._used = 0
        self._free: deque[ActivationExtent] = deque()
        self._writes: deque[CopyHandle] = deque()

    def put(self, nbytes: int, fill: Fill) -> ActivationExtent:
        """See :class:`ActivationStorage`."""
        data = torch.empty(nbytes, dtype=torch.uint8, device=self._device.device)
        fill(data)
        self._collect()
        facts = self._store.facts()
        if facts.largest_free < nbytes:
            self._store.reserve(facts.capacity + max(nbytes, _STORE_GROWTH_BYTES), zeros=False)
        extent = ActivationExtent(self._store.allocate(nbytes), nbytes)
        self._used += extent.nbytes
        first = extent.offset
        extent.written = self._bounce_buffer.write(
            data, lambda offset, chunk: self._store.write(first + offset, chunk)
        )
        # What leaves an accelerator goes on to storage while the next call computes.
        self._writes.append(extent.written)
        _release_sources(self._writes, 1 if self._device.is_accelerator else 0)
        return extent

    def release_sources(self) -> None:
        """See :class:`ActivationStorage`."""
        _release_sources(self._writes)

    def fetch(self, extent: ActivationExtent, into: torch.Tensor) -> CopyHandle:
        """See :class:`ActivationStorage`."""
        self.release_sources()
        extent.written.wait()
        first = extent.offset
        extent.fetched = self._bounce_buffer.read(
            into, lambda offset, chunk: self._store.read(first + offset, chunk)
        )
        return extent.fetched

    def release(self, extent: ActivationExtent) -> None:
        """See :class:`ActivationStorage`."""
        self._free.append(extent)

    def used_bytes(self) -> int:
        """See :class:`ActivationStorage`."""
        self._collect()
        return self._used

    def allocated_bytes(self) -> dict[Tier, int]:
        """See :class:`ActivationStorage`."""
        return {"nvme": self._store.facts().capacity, "host": self._bounce_buffer.nbytes}

    def _collect(self) -> None:
        while self._free:
            extent = self._free.popleft()
            extent.wait_unused()
            self._used -= extent.nbytes
            self._store.release(extent.offset)


def _extent_in(block: _MemoryBlock, offset: int, nbytes: int) -> ActivationExtent:
    block.live += extent_bytes(nbytes)
    return ActivationExtent(offset, nbytes, block.memory[offset : offset + nbytes], block)


def _release_sources(copies: deque[CopyHandle], but: int = 0) -> None:
    """Wait for the sources of all copies but the newest ones."""
    while len(copies) > but:
        copies.popleft().wait_source()


def _memory(extent: ActivationExtent) -> torch.Tensor:
    if extent.memory is None:
        raise zero_ext_bug("expected an extent in memory, got one in NVMe storage")
    return extent.memory
