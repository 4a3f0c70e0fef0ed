"""Room for kept bytes in one tier: extents that are taken in forward and given back after backward."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from zero_ext.config import Tier
from zero_ext.config.buffer_sizes import SLOTS, STORAGE_ALIGNMENT, extent_bytes
from zero_ext.offload import HERE, Arrival, Device, NvmeStore
from zero_ext.offload.device.bounce_buffer import Transit
from zero_ext.offload.extent_arena import ExtentArena

_BLOCK_BYTES = 16 << 20
_STORE_GROWTH_BYTES = 64 << 20


# Writes all bytes of memory on the device, uint8.
Fill = Callable[[torch.Tensor], object]


class RoomIsFull(RuntimeError):
    """The one buffer of kept inputs has no place for another call's. Where inputs are partitioned, the ranks'
    connections end with it."""


@dataclass
class Place:
    """An extent, the memory that it is in, if any, and the last transfer that fills and reads it."""

    offset: int
    nbytes: int
    memory: torch.Tensor | None = None
    block: _Block | None = None
    written: Arrival = HERE
    fetched: Arrival = HERE

    def settle(self) -> None:
        """Returns when nothing uses the extent any more, well or not."""
        # Not let_go: that tells of what was written from, while storage may still be writing.
        with contextlib.suppress(RuntimeError):
            self.written.wait()
        self.fetched.let_go()


class Room(Protocol):
    """Places of bytes in one tier. Those that :meth:`give` names are free when the next one is taken: it may
    be called by whatever thread drops a graph, in the middle of anything."""

    tier: Tier
    block: int  # bytes of which places and transfers are multiples

    def put(self, nbytes: int, fill: Fill) -> Place:
        """Starts to keep ``nbytes`` that ``fill`` writes. What it wrote stays on the device until two more
        were put, or :meth:`let_go`."""

    def let_go(self) -> None:
        """Nothing that was put needs its memory on the device any more."""

    def fetch(self, place: Place, into: torch.Tensor) -> Arrival:
        """Starts to copy a place's bytes to ``into``, uint8 on the device."""

    def give(self, place: Place) -> None:
        """The place is not needed any more."""

    def kept_bytes(self) -> int:
        """Bytes of the places in use."""

    def held_bytes(self) -> dict[Tier, int]:
        """Bytes taken from each tier, in use or not."""


@dataclass
class _Block:
    """Memory in one piece, and which of its bytes are taken."""

    memory: torch.Tensor
    arena: ExtentArena = field(init=False)
    live: int = 0

    def __post_init__(self) -> None:
        self.arena = ExtentArena(self.memory.nbytes)


class MemoryRoom:
    """A :class:`Room` in device or host memory, in blocks that are allocated once and used again.

    With ``calls`` it is one block, of so many times the first place; else it grows, and blocks that nothing
    lies in go before it does, so sizes that change from step to step leave no holes behind.
    """

    block = 64

    def __init__(self, tier: Tier, device: Device, calls: int | None = None) -> None:
        self.tier: Tier = tier
        self._device = device
        self._calls = calls
        self._blocks: list[_Block] = []
        self._free: deque[Place] = deque()
        self._copies: deque[Arrival] = deque()

    def put(self, nbytes: int, fill: Fill) -> Place:
        """See :class:`Room`."""
        place = self._take(nbytes)
        memory = _memory(place)
        try:
            part = self._filled(memory, fill)
        except BaseException:
            self.give(place)
            raise
        if part is memory:
            return place
        place.written = self._device.copy(memory, part)
        # The copy's source stays alive with the arrival, two calls long: by then it has ended.
        self._copies.append(place.written)
        _let_go(self._copies, 2)
        return place

    def let_go(self) -> None:
        """See :class:`Room`."""
        _let_go(self._copies)

    def fetch(self, place: Place, into: torch.Tensor) -> Arrival:
        """See :class:`Room`."""
        self.let_go()
        place.written.wait()
        place.fetched = self._device.copy(into, _memory(place))
        return place.fetched

    def give(self, place: Place) -> None:
        """See :class:`Room`."""
        self._free.append(place)

    def kept_bytes(self) -> int:
        """See :class:`Room`."""
        self._collect()
        return sum(block.live for block in self._blocks)

    def held_bytes(self) -> dict[Tier, int]:
        """See :class:`Room`."""
        return {self.tier: sum(block.memory.nbytes for block in self._blocks)}

    def _filled(self, memory: torch.Tensor, fill: Fill) -> torch.Tensor:
        """``memory`` itself where it is the device's: no byte is copied twice there."""
        part = memory
        if memory.device != self._device.device:
            part = torch.empty(memory.nbytes, dtype=torch.uint8, device=self._device.device)
        fill(part)
        return part

    def _take(self, nbytes: int) -> Place:
        self._collect()
        for block in self._blocks:
            offset = block.arena.take(nbytes)
            if offset is not None:
                return _place(block, offset, nbytes)
        block = self._grow(nbytes)
        offset = block.arena.take(nbytes)
        if offset is None:
            raise AssertionError(f"{nbytes} bytes do not fit into a new block of {block.memory.nbytes}")
        return _place(block, offset, nbytes)

    def _grow(self, nbytes: int) -> _Block:
        wanted = max(extent_bytes(nbytes), _BLOCK_BYTES)
        if self._calls is not None:
            if self._blocks:
                raise RoomIsFull(self._full(nbytes))
            wanted = self._calls * extent_bytes(nbytes)
        self._blocks = [block for block in self._blocks if block.live]
        self._blocks.append(_Block(self._device.allocate(self.tier, wanted, torch.uint8)))
        return self._blocks[-1]

    def _full(self, nbytes: int) -> str:
        held, live = self._blocks[0].memory.nbytes, self._blocks[0].live
        return (
            f"activation_checkpointing.number_checkpoints is {self._calls}: the buffer of {held} bytes keeps "
            f"{live} and has no place for {nbytes} more. Raise number_checkpoints to the calls of all "
            "forward passes whose backward is still to come (it counts calls of the first one's size), or "
            "set contiguous_memory_optimization to false."
        )

    def _collect(self) -> None:
        while self._free:
            place = self._free.popleft()
            place.settle()
            block = place.block
            if block is None:
                raise AssertionError("a place in memory without its block")
            block.arena.give(place.offset)
            block.live -= extent_bytes(place.nbytes)


class StoreRoom:
    """A :class:`Room` in ``store``; bytes pass through chunks of pinned host memory, ``buffer_bytes`` in
    all."""

    tier: Tier = "nvme"
    block = STORAGE_ALIGNMENT

    def __init__(self, store: NvmeStore, device: Device, buffer_bytes: int) -> None:
        grain = 2 * SLOTS * STORAGE_ALIGNMENT
        self._way = Transit(device, max(buffer_bytes // grain, 1) * grain)
        self._store = store
        self._device = device
        self._kept = 0
        self._free: deque[Place] = deque()
        self._writes: deque[Arrival] = deque()

    def put(self, nbytes: int, fill: Fill) -> Place:
        """See :class:`Room`."""
        part = torch.empty(nbytes, dtype=torch.uint8, device=self._device.device)
        fill(part)
        self._collect()
        facts = self._store.facts()
        if facts.largest_free < nbytes:
            self._store.reserve(facts.capacity + max(nbytes, _STORE_GROWTH_BYTES), zeros=False)
        place = Place(self._store.allocate(nbytes), nbytes)
        self._kept += place.nbytes
        first = place.offset
        place.written = self._way.write(part, lambda offset, chunk: self._store.write(first + offset, chunk))
        # What leaves an accelerator goes on to storage while the next call computes.
        self._writes.append(place.written)
        _let_go(self._writes, 1 if self._device.is_accelerator else 0)
        return place

    def let_go(self) -> None:
        """See :class:`Room`."""
        _let_go(self._writes)

    def fetch(self, place: Place, into: torch.Tensor) -> Arrival:
        """See :class:`Room`."""
        self.let_go()
        place.written.wait()
        first = place.offset
        place.fetched = self._way.read(into, lambda offset, chunk: self._store.read(first + offset, chunk))
        return place.fetched

    def give(self, place: Place) -> None:
        """See :class:`Room`."""
        self._free.append(place)

    def kept_bytes(self) -> int:
        """See :class:`Room`."""
        self._collect()
        return self._kept

    def held_bytes(self) -> dict[Tier, int]:
        """See :class:`Room`."""
        return {"nvme": self._store.facts().capacity, "host": self._way.nbytes}

    def _collect(self) -> None:
        while self._free:
            place = self._free.popleft()
            place.settle()
            self._kept -= place.nbytes
            self._store.release(place.offset)


def _place(block: _Block, offset: int, nbytes: int) -> Place:
    block.live += extent_bytes(nbytes)
    return Place(offset, nbytes, block.memory[offset : offset + nbytes], block)


def _let_go(arrivals: deque[Arrival], but: int = 0) -> None:
    """Lets go of all arrivals but the newest ones."""
    while len(arrivals) > but:
        arrivals.popleft().let_go()


def _memory(place: Place) -> torch.Tensor:
    if place.memory is None:
        raise AssertionError("a place in storage where one in memory was meant")
    return place.memory
