"""The parts in which an optimizer step runs where its state lies: whole, or through fixed staging memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from zero_ext import ops
from zero_ext.config import Tier
from zero_ext.config.buffer_sizes import CHUNK_BUFFERS, STORAGE_ALIGNMENT, StepRooms
from zero_ext.offload.device.device_memory import CPU, Device
from zero_ext.offload.device.side_stream import HERE, Arrival
from zero_ext.offload.shard_storage import ShardHome


class StepPart(NamedTuple):
    """Elements [begin, end) of a range: their gradients, and room for their updated parameters if wanted,
    both in memory of the tier where the state lies, or through which it passes.

    ``staged`` is ``output`` if it is staging memory, which is sent on: the ranges in ``sent``, counted from
    ``begin``, or all of it if there are none.
    """

    begin: int
    end: int
    gradient: torch.Tensor
    output: torch.Tensor | None
    staged: torch.Tensor | None
    sent: list[tuple[int, int]]


class ChunkRooms(NamedTuple):
    """``CHUNK_BUFFERS`` buffers for chunks of state, the fp32 gradient of one chunk, bytes for its
    parameters; all begin at whole pages."""

    buffers: Sequence[torch.Tensor]
    gradient: torch.Tensor
    output: torch.Tensor


class StepStaging:
    """Memory of fixed size, allocated here, through which gradients come to, and parameters leave, a step in
    another tier, and on which torch's own optimizers work: ``rooms`` by the tier of the step.

    Rooms of more than a page are used in halves, so that one part comes or leaves while another one is
    worked on.
    """

    def __init__(self, rooms: Mapping[Tier, StepRooms], device: Device = CPU) -> None:
        self._rooms: dict[Tier, _TierRooms] = {
            tier: _TierRooms(device, tier, rooms.get(tier, StepRooms())) for tier in ("device", "host")
        }
        self._ahead: tuple[ShardHome, tuple[torch.Tensor, Arrival]] | None = None

    def parts(
        self,
        tier: Tier,
        gradient: ShardHome,
        output: ShardHome | None,
        grain: int = ops.BLOCK_ELEMENTS,
        then: tuple[ShardHome, ShardHome | None] | None = None,
    ) -> Iterator[StepPart]:
        """The parts of a range [n] whose state lies in memory of ``tier``: one where all else does, too. They
        begin at multiples of ``grain`` elements.

        What a part's ``output`` holds replaces that part of ``output`` when the next part is asked for; it is
        there for who comes after the last part. ``then`` are the gradient and the output of the range that
        will be asked for next, whose first part is brought meanwhile.
        """
        rooms = self._rooms[tier]
        in_place = output.memory(tier) if output is not None else None
        staged_output = output if in_place is None else None
        elements = self._elements(tier, gradient, staged_output, grain)
        early = rooms.gradients.has_halves
        stored: Arrival = HERE
        coming = self._come(tier, gradient, min(elements, gradient.numel))
        for begin in range(0, gradient.numel, elements):
            end = min(begin + elements, gradient.numel)
            following = end, min(end + elements, gradient.numel)
            part, arrival = coming
            arrival.wait()
            if end < gradient.numel and early:
                coming = self._bring(gradient, *following, tier)
            elif end == gradient.numel and early and then is not None:
                self._start(tier, *then, grain)
            if staged_output is None:
                near = None if in_place is None else in_place[begin:end]
                yield StepPart(begin, end, part, near, None, [])
            else:
                room = rooms.outputs.take(end - begin, staged_output.dtype)
                sent: list[tuple[int, int]] = []
                yield StepPart(begin, end, part, room, room, sent)
                for first, last in sent or [(0, end - begin)]:
                    stored = staged_output.store(begin + first, room[first:last], tier)
                rooms.outputs.lend(stored)
            if end < gradient.numel and not early:
                coming = self._bring(gradient, *following, tier)
        stored.wait()

    def _elements(self, tier: Tier, gradient: ShardHome, staged: ShardHome | None, grain: int) -> int:
        """Elements of a part of a range with parameters that are ``staged``, if any are."""
        rooms, elements = self._rooms[tier], gradient.numel
        if gradient.memory(tier) is None:
            elements = min(elements, rooms.gradients.elements(gradient.dtype))
        if staged is not None:
            elements = min(elements, rooms.outputs.elements(staged.dtype))
        return _cut(elements, gradient.numel, grain)

    def _start(self, tier: Tier, gradient: ShardHome, output: ShardHome | None, grain: int) -> None:
        """Begins to bring the first part of the next range."""
        staged = output if output is not None and output.memory(tier) is None else None
        end = self._elements(tier, gradient, staged, grain)
        self._ahead = gradient, self._bring(gradient, 0, end, tier)

    def _come(self, tier: Tier, gradient: ShardHome, end: int) -> tuple[torch.Tensor, Arrival]:
        """The first part of a range, which may be on its way."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is gradient:
            return ahead[1]
        if ahead is not None:
            ahead[1][1].let_go()  # of a step that broke off
        return self._bring(gradient, 0, end, tier)

    def reaches(self, home: ShardHome | None, tier: Tier) -> bool:
        """Whether ops on memory of ``tier`` can use ``home`` where it is: there, in storage, or nowhere."""
        if home is None or home.tier == "nvme":
            return True
        return self._rooms[tier].device.of(home.tier) == self._rooms[tier].device.of(tier)

    def beside(self, tier: Tier, *small: torch.Tensor) -> list[torch.Tensor]:
        """See :meth:`Device.beside`; those that lie in such memory stay where they are."""
        device = self._rooms[tier].device
        far = [each for each in small if each.device.type == "cpu"]
        if len(far) == len(small):
            return device.beside(tier, *far)
        come = iter(device.beside(tier, *far))
        return [next(come) if each.device.type == "cpu" else each for each in small]

    def send(self, values: torch.Tensor, output: ShardHome, tier: Tier) -> None:
        """Replaces all of ``output`` [n] in another tier by ``values`` [n] of memory of ``tier``, cast."""
        rooms = self._rooms[tier].outputs
        elements = _cut(rooms.elements(output.dtype), values.numel(), ops.BLOCK_ELEMENTS)
        for begin in range(0, values.numel(), elements):
            part = values[begin : begin + elements]
            room = rooms.take(part.numel(), output.dtype).copy_(part)
            stored = output.store(begin, room, tier)
            rooms.lend(stored)
            stored.wait()

    def scaled(self, gradient: ShardHome, scale: torch.Tensor, tier: Tier) -> torch.Tensor:
        """All of ``gradient`` times ``scale``, in fp32 and memory of ``tier``; valid until the next call."""
        rooms = self._rooms[tier]
        scaled = _front(rooms.elementwise, gradient.numel, torch.float32)
        (factor,) = self.beside(tier, scale)
        for part in self.parts(tier, gradient, None):
            scaled[part.begin : part.end].copy_(part.gradient).mul_(factor)
        return scaled

    def chunk_rooms(self, chunk_bytes: int, chunk_elements: int) -> ChunkRooms:
        """Room for chunks of state of ``chunk_bytes`` bytes in host memory; valid until the next call."""
        memory = self._rooms["host"].elementwise
        gradients = CHUNK_BUFFERS * chunk_bytes
        outputs = gradients + chunk_elements * 4
        buffers = [
            memory[number * chunk_bytes : (number + 1) * chunk_bytes] for number in range(CHUNK_BUFFERS)
        ]
        return ChunkRooms(buffers, memory[gradients:outputs].view(torch.float32), memory[outputs:])

    def bring(self, gradient: ShardHome, begin: int, end: int, tier: Tier) -> torch.Tensor:
        """Elements [begin, end) in memory of ``tier``: where they lie there, else copied, until the next
        call. ``begin`` is a multiple of the gradient's grain, and the elements fit into the room."""
        near = gradient.memory(tier)
        if near is not None:
            return near[begin:end]
        room = _front(self._rooms[tier].gradients.memory, _whole(gradient, end - begin), gradient.dtype)
        gradient.fetch(room, begin, tier).wait()
        return room[: end - begin]

    def _bring(self, gradient: ShardHome, begin: int, end: int, tier: Tier) -> tuple[torch.Tensor, Arrival]:
        near = gradient.memory(tier)
        if near is not None:
            return near[begin:end], HERE
        room = self._rooms[tier].gradients.take(_whole(gradient, end - begin), gradient.dtype)
        return room[: end - begin], gradient.fetch(room, begin, tier)

    def holds_outputs(self, tier: Tier) -> bool:
        """Whether there is room for parameters that leave a step in ``tier``."""
        return self._rooms[tier].outputs.memory.nbytes > 0

    def held_bytes(self) -> dict[Tier, int]:
        """Bytes of it by tier."""
        return {tier: rooms.nbytes for tier, rooms in self._rooms.items()}


class _Room:
    """Memory in two halves of whole pages that are used in turn, or in one piece if it is a page."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        half = memory.nbytes // (2 * STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT or memory.nbytes
        self._parts = [memory[:half], memory[half : 2 * half]] if half < memory.nbytes else [memory]
        self._lent: list[Arrival] = [HERE] * len(self._parts)
        self._now = 0

    @property
    def has_halves(self) -> bool:
        """Whether what was taken stays valid for one more :meth:`take`."""
        return len(self._parts) > 1

    def elements(self, dtype: torch.dtype) -> int:
        """Most elements that :meth:`take` gives."""
        return self._parts[0].nbytes // dtype.itemsize

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next half, once nobody reads it any more."""
        self._now = (self._now + 1) % len(self._parts)
        self._lent[self._now].let_go()
        return _front(self._parts[self._now], numel, dtype)

    def lend(self, arrival: Arrival) -> None:
        """The half taken last is the source of ``arrival``."""
        self._lent[self._now] = arrival


class _TierRooms:
    def __init__(self, device: Device, tier: Tier, rooms: StepRooms) -> None:
        self.device = device
        gradients, outputs, self.elementwise = (device.allocate(tier, size, torch.uint8) for size in rooms)
        self.gradients, self.outputs = _Room(gradients), _Room(outputs)

    @property
    def nbytes(self) -> int:
        rooms = (self.gradients.memory, self.outputs.memory, self.elementwise)
        return sum(room.nbytes for room in rooms)


def _cut(elements: int, numel: int, grain: int) -> int:
    """Elements of a part where ``elements`` fit and ``numel`` are wanted: all, or whole grains, at least
    blocks of 8-bit moments. Rooms are whole pages, so parts are whole blocks of storage as well."""
    if elements >= numel:
        return max(numel, 1)
    if elements < grain:
        raise AssertionError(f"a room for {elements} of {numel} elements, which move in {grain} at least")
    return elements // grain * grain


def _whole(gradient: ShardHome, elements: int) -> int:
    """``elements`` rounded up to what ``gradient`` moves in."""
    return -(-elements // gradient.grain) * gradient.grain


def _front(room: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return room[: numel * dtype.itemsize].view(dtype)
