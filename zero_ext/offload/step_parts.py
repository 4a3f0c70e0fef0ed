"""The parts in which an optimizer step runs where its state lies: whole, or through fixed staging memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from zero_ext import ops
from zero_ext.config import Tier
from zero_ext.offload.shard_home import STORAGE_ALIGNMENT, ShardHome, allocate
from zero_ext.offload.state_chunks import CHUNK_BUFFERS


class StepPart(NamedTuple):
    """Elements [begin, end) of a range: their gradients, and room for their updated parameters if wanted,
    both in memory of the tier where the state lies."""

    begin: int
    end: int
    gradient: torch.Tensor
    output: torch.Tensor | None
    staged: torch.Tensor | None = None  # ``output`` if it is staging memory, all of which is sent on


class StepRooms(NamedTuple):
    """Bytes of staging memory: for gradients on their way to a step, parameters on their way from it, and
    for what torch's own optimizers work on."""

    gradients: int
    outputs: int
    elementwise: int


class ChunkRooms(NamedTuple):
    """``CHUNK_BUFFERS`` buffers for chunks of state, the fp32 gradient of one chunk, bytes for its
    parameters; all begin at whole pages."""

    buffers: Sequence[torch.Tensor]
    gradient: torch.Tensor
    output: torch.Tensor


def chunk_rooms_bytes(chunk_elements: int, state: int, output: int) -> int:
    """Bytes of :class:`ChunkRooms` for elements with ``state`` bytes of values and ``output`` of parameters
    in storage."""
    return chunk_elements * (CHUNK_BUFFERS * state + 4 + output)


def part_elements(ring_bytes: int) -> int:
    """Most elements of a part: ``ring_bytes`` hold their gradients and parameters in fp32."""
    return ring_bytes // (8 * STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT


class StepStaging:
    """Memory of fixed size, allocated here, through which gradients come to, and parameters leave, a step in
    another tier, and on which torch's own optimizers work."""

    def __init__(self, rooms: StepRooms) -> None:
        self._gradients, self._outputs, self._elementwise = (allocate(size, torch.uint8) for size in rooms)

    def parts(self, tier: Tier, gradient: ShardHome, output: ShardHome | None) -> Iterator[StepPart]:
        """The parts of a range [n] whose state lies in memory of ``tier``: one where all else does, too.

        What a part's ``output`` holds, all of it, replaces that part of ``output`` when the next part is
        asked for.
        """
        in_place = output.memory(tier) if output is not None else None
        staged_output = output if in_place is None else None
        elements = gradient.numel
        if gradient.memory(tier) is None:
            elements = min(elements, _elements_in(self._gradients, gradient.dtype))
        if staged_output is not None:
            elements = min(elements, _elements_in(self._outputs, staged_output.dtype))
        elements = _cut(elements, gradient.numel)
        for begin in range(0, gradient.numel, elements):
            end = min(begin + elements, gradient.numel)
            part = self.bring(gradient, begin, end, tier)
            if staged_output is None:
                yield StepPart(begin, end, part, None if in_place is None else in_place[begin:end])
                continue
            room = _front(self._outputs, end - begin, staged_output.dtype)
            yield StepPart(begin, end, part, room, staged=room)
            staged_output.store(begin, room, tier)

    def send(self, values: torch.Tensor, output: ShardHome, tier: Tier) -> None:
        """Replaces all of ``output`` [n] in storage by ``values`` [n] of memory of ``tier``, cast."""
        elements = _cut(_elements_in(self._outputs, output.dtype), values.numel())
        for begin in range(0, values.numel(), elements):
            part = values[begin : begin + elements]
            output.store(begin, _front(self._outputs, part.numel(), output.dtype).copy_(part), tier)

    def scaled(self, gradient: ShardHome, scale: torch.Tensor, tier: Tier) -> torch.Tensor:
        """All of ``gradient`` times ``scale``, in fp32 and memory of ``tier``; valid until the next call."""
        scaled = _front(self._elementwise, gradient.numel, torch.float32)
        for part in self.parts(tier, gradient, None):
            scaled[part.begin : part.end].copy_(part.gradient).mul_(scale)
        return scaled

    def chunk_rooms(self, chunk_bytes: int, chunk_elements: int) -> ChunkRooms:
        """Room for chunks of state of ``chunk_bytes`` bytes; valid until the next call."""
        gradients = CHUNK_BUFFERS * chunk_bytes
        outputs = gradients + chunk_elements * 4
        buffers = [
            self._elementwise[number * chunk_bytes : (number + 1) * chunk_bytes]
            for number in range(CHUNK_BUFFERS)
        ]
        gradient = self._elementwise[gradients:outputs].view(torch.float32)
        return ChunkRooms(buffers, gradient, self._elementwise[outputs:])

    def bring(self, gradient: ShardHome, begin: int, end: int, tier: Tier) -> torch.Tensor:
        """Elements [begin, end) in memory of ``tier``: where they lie there, else copied, until the next
        call. ``begin`` is a multiple of the gradient's grain, and the elements fit into the room."""
        near = gradient.memory(tier)
        if near is not None:
            return near[begin:end]
        whole = -(-(end - begin) // gradient.grain) * gradient.grain
        room = _front(self._gradients, whole, gradient.dtype)
        gradient.fetch(room, begin, tier).wait()
        return room[: end - begin]

    @property
    def holds_outputs(self) -> bool:
        """Whether there is room for parameters."""
        return self._outputs.nbytes > 0

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return self._gradients.nbytes + self._outputs.nbytes + self._elementwise.nbytes


def _elements_in(room: torch.Tensor, dtype: torch.dtype) -> int:
    return room.nbytes // dtype.itemsize


def _cut(elements: int, numel: int) -> int:
    """Elements of a part where ``elements`` fit and ``numel`` are wanted: all, or whole blocks of
    8-bit moments. Rooms are whole pages, so parts are whole blocks of storage as well."""
    return max(numel if elements >= numel else elements // ops.BLOCK_ELEMENTS * ops.BLOCK_ELEMENTS, 1)


def _front(room: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return room[: numel * dtype.itemsize].view(dtype)
