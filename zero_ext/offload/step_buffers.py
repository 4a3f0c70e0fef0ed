"""The chunks of an optimizer step in the tier of its state: in place, or through fixed staging memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from zero_ext import ops
from zero_ext.config.buffer_sizes import CHUNK_BUFFERS, STORAGE_ALIGNMENT, StagingSizes
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.config.tiers import TIERS, Tier, is_stored
from zero_ext.offload.device_memory import CPU, Device
from zero_ext.offload.shard_storage import ShardStorage
from zero_ext.offload.side_stream import COMPLETED, CopyHandle


class StepChunk(NamedTuple):
    """Elements [begin, end) of a range: their gradients, and a buffer for their updated parameters if asked
    for.

    Both are in memory of the tier where the state is, or through which it passes. ``staged`` is ``output`` if
    that is staging memory. Its ranges in ``sent``, counted from ``begin``, are sent on, or all of it if there
    are none. An empty range there says that nothing is sent.
    """

    begin: int
    end: int
    gradient: torch.Tensor
    output: torch.Tensor | None
    staged: torch.Tensor | None
    sent: list[tuple[int, int]]


class StateChunkBuffers(NamedTuple):
    """``CHUNK_BUFFERS`` buffers for chunks of state, the fp32 gradient of one chunk, bytes for its
    parameters. All begin at whole pages."""

    buffers: Sequence[torch.Tensor]
    gradient: torch.Tensor
    output: torch.Tensor


class StepStaging:
    """Memory of fixed size, allocated here, through which gradients come to, and parameters leave, a step in
    another tier, and on which torch's own optimizers work: ``sizes`` by the tier of the step.

    Buffers of more than a page are used in halves, so that one chunk is copied while another one is updated.
    """

    def __init__(self, sizes: Mapping[Tier, StagingSizes], device: Device = CPU) -> None:
        self._buffers: dict[Tier, _TierBuffers] = {
            tier: _TierBuffers(device, tier, sizes.get(tier, StagingSizes())) for tier in ("device", "host")
        }
        self._ahead: tuple[ShardStorage, tuple[torch.Tensor, CopyHandle]] | None = None

    def chunks(
        self,
        tier: Tier,
        gradient: ShardStorage,
        output: ShardStorage | None,
        grain: int = ops.BLOCK_ELEMENTS,
        then: tuple[ShardStorage, ShardStorage | None] | None = None,
    ) -> Iterator[StepChunk]:
        """Yield the chunks of a range [n] with state in memory of ``tier``.

        There is one if everything else is in that memory, too. They begin at multiples of ``grain`` elements.

        The values in a chunk's ``output`` replace those of ``output`` when the next chunk is requested. All
        are stored once the iterator has ended. ``then`` are the gradient and the output of the range that is
        requested next. Its first chunk is copied meanwhile.
        """
        tier, buffers = TIERS[tier].near, self._of(tier)
        in_place = output.memory(tier) if output is not None else None
        staged_output = output if in_place is None else None
        elements = self._elements(tier, gradient, staged_output, grain)
        # With a single buffer the next chunk would overwrite the one that the caller works on, so
        # it is fetched only after that.
        early = buffers.gradients.has_halves
        stored: CopyHandle = COMPLETED
        pending = self._first_chunk(tier, gradient, min(elements, gradient.numel))
        for begin in range(0, gradient.numel, elements):
            end = min(begin + elements, gradient.numel)
            following = end, min(end + elements, gradient.numel)
            chunk, copy = pending
            copy.wait()
            if end < gradient.numel and early:
                pending = self._start_fetch(gradient, *following, tier)
            elif end == gradient.numel and early and then is not None:
                self._prefetch(tier, *then, grain)
            if staged_output is None:
                near = None if in_place is None else in_place[begin:end]
                yield StepChunk(begin, end, chunk, near, None, [])
            else:
                staged = buffers.outputs.acquire(end - begin, staged_output.dtype)
                sent: list[tuple[int, int]] = []
                yield StepChunk(begin, end, chunk, staged, staged, sent)
                for first, last in sent or [(0, end - begin)]:
                    if first == last:
                        continue
                    stored = staged_output.store(begin + first, staged[first:last], tier)
                buffers.outputs.lend(stored)
            if end < gradient.numel and not early:
                pending = self._start_fetch(gradient, *following, tier)
        # Stores into memory end in order, and those to NVMe have ended when they return. So the
        # last one stands for all.
        stored.wait()

    def _elements(self, tier: Tier, gradient: ShardStorage, staged: ShardStorage | None, grain: int) -> int:
        """Return the elements of one chunk of a range with parameters that are ``staged``, if any are."""
        buffers, elements = self._of(tier), gradient.numel
        if gradient.memory(tier) is None:
            elements = min(elements, buffers.gradients.elements(gradient.dtype))
        if staged is not None:
            elements = min(elements, buffers.outputs.elements(staged.dtype))
        return _cut(elements, gradient.numel, grain)

    def _prefetch(self, tier: Tier, gradient: ShardStorage, output: ShardStorage | None, grain: int) -> None:
        """Start to copy the first chunk of the next range."""
        staged = output if output is not None and output.memory(tier) is None else None
        end = self._elements(tier, gradient, staged, grain)
        self._ahead = gradient, self._start_fetch(gradient, 0, end, tier)

    def _first_chunk(self, tier: Tier, gradient: ShardStorage, end: int) -> tuple[torch.Tensor, CopyHandle]:
        """Return the first chunk of a range, which may be in flight already."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is gradient:
            return ahead[1]
        if ahead is not None:
            ahead[1][1].wait_source()  # of a step that broke off
        return self._start_fetch(gradient, 0, end, tier)

    def can_access(self, shard: ShardStorage | None, tier: Tier) -> bool:
        """Return whether ops on memory of ``tier`` can use ``shard`` in place: there, in storage, or None."""
        if shard is None or is_stored(shard.tier):
            return True
        device = self._of(tier).device
        return device.torch_device(shard.tier) == device.torch_device(tier)

    def torch_device(self, tier: Tier) -> torch.device:
        """Return the device that has the memory of a step in ``tier``."""
        return self._of(tier).device.torch_device(tier)

    def to_tier(self, tier: Tier, *small: torch.Tensor) -> list[torch.Tensor]:
        """See :meth:`Device.to_tier`; tensors that are in such memory already are returned as they are."""
        device = self._of(tier).device
        far = [each for each in small if each.device.type == "cpu"]
        moved = iter(device.to_tier(tier, *far))
        return [next(moved) if each.device.type == "cpu" else each for each in small]

    def send(self, values: torch.Tensor, output: ShardStorage, tier: Tier) -> None:
        """Replace all of ``output`` [n] in another tier by ``values`` [n] of memory of ``tier``, cast."""
        buffer = self._of(tier).outputs
        elements = _cut(buffer.elements(output.dtype), values.numel(), ops.BLOCK_ELEMENTS)
        for begin in range(0, values.numel(), elements):
            chunk = values[begin : begin + elements]
            staged = buffer.acquire(chunk.numel(), output.dtype).copy_(chunk)
            stored = output.store(begin, staged, tier)
            buffer.lend(stored)
            stored.wait()

    def scaled(self, gradient: ShardStorage, scale: torch.Tensor, tier: Tier) -> torch.Tensor:
        """Return all of ``gradient`` times ``scale``, in fp32 and memory of ``tier``; valid until the next
        call.
        """
        scaled = _front(self._of(tier).elementwise, gradient.numel, torch.float32)
        (factor,) = self.to_tier(tier, scale)
        for chunk in self.chunks(tier, gradient, None):
            scaled[chunk.begin : chunk.end].copy_(chunk.gradient).mul_(factor)
        return scaled

    def state_chunk_buffers(self, chunk_bytes: int, chunk_elements: int) -> StateChunkBuffers:
        """Return buffers for chunks of state of ``chunk_bytes`` bytes in host memory.

        They are valid until the next call.
        """
        memory = self._buffers["host"].elementwise
        gradients = CHUNK_BUFFERS * chunk_bytes
        outputs = gradients + chunk_elements * 4
        buffers = [
            memory[number * chunk_bytes : (number + 1) * chunk_bytes] for number in range(CHUNK_BUFFERS)
        ]
        return StateChunkBuffers(buffers, memory[gradients:outputs].view(torch.float32), memory[outputs:])

    def fetch_gradient(self, gradient: ShardStorage, begin: int, end: int, tier: Tier) -> torch.Tensor:
        """Return elements [begin, end) in memory of ``tier``: in place if they are there, else a copy that is
        valid until the next call. ``begin`` is a multiple of the gradient's grain, and the elements fit into
        the buffer."""
        near = gradient.memory(tier)
        if near is not None:
            return near[begin:end]
        padded = _round_up(gradient, end - begin)
        buffer = _front(self._of(tier).gradients.memory, padded, gradient.dtype)
        gradient.fetch(buffer, begin, tier).wait()
        return buffer[: end - begin]

    def _start_fetch(
        self, gradient: ShardStorage, begin: int, end: int, tier: Tier
    ) -> tuple[torch.Tensor, CopyHandle]:
        near = gradient.memory(tier)
        if near is not None:
            return near[begin:end], COMPLETED
        buffer = self._of(tier).gradients.acquire(_round_up(gradient, end - begin), gradient.dtype)
        return buffer[: end - begin], gradient.fetch(buffer, begin, tier)

    def _of(self, tier: Tier) -> _TierBuffers:
        return self._buffers[TIERS[tier].near]

    def holds_outputs(self, tier: Tier) -> bool:
        """Return whether there is a buffer for parameters that leave a step in ``tier``."""
        return self._of(tier).outputs.memory.nbytes > 0

    def allocated_bytes(self) -> dict[Tier, int]:
        """Return its bytes by tier."""
        return {tier: buffers.nbytes for tier, buffers in self._buffers.items()}


class _DoubleBuffer:
    """Memory in two halves of whole pages that are used in turn, or undivided if it is a page."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        half = memory.nbytes // (2 * STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT or memory.nbytes
        self._halves = [memory[:half], memory[half : 2 * half]] if half < memory.nbytes else [memory]
        self._lent: list[CopyHandle] = [COMPLETED] * len(self._halves)
        self._now = 0

    @property
    def has_halves(self) -> bool:
        """Return whether acquired memory stays valid for one more :meth:`acquire`."""
        return len(self._halves) > 1

    def elements(self, dtype: torch.dtype) -> int:
        """Return the most elements that :meth:`acquire` returns."""
        return self._halves[0].nbytes // dtype.itemsize

    def acquire(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the next half, once no copy reads it any more."""
        self._now = (self._now + 1) % len(self._halves)
        self._lent[self._now].wait_source()
        return _front(self._halves[self._now], numel, dtype)

    def lend(self, copy: CopyHandle) -> None:
        """Record that the half acquired last is the source of ``copy``."""
        self._lent[self._now] = copy


class _TierBuffers:
    def __init__(self, device: Device, tier: Tier, sizes: StagingSizes) -> None:
        self.device = device
        gradients, outputs, self.elementwise = (device.allocate(tier, size, torch.uint8) for size in sizes)
        self.gradients, self.outputs = _DoubleBuffer(gradients), _DoubleBuffer(outputs)

    @property
    def nbytes(self) -> int:
        buffers = (self.gradients.memory, self.outputs.memory, self.elementwise)
        return sum(buffer.nbytes for buffer in buffers)


def _cut(elements: int, numel: int, grain: int) -> int:
    """Return the elements of a chunk where ``elements`` fit and ``numel`` are asked for: all, or whole
    grains.

    A grain is at least a block of 8-bit moments. Buffers are whole pages, so chunks are whole blocks of
    storage as well.
    """
    if elements >= numel:
        return max(numel, 1)
    if elements < grain:
        raise zero_ext_bug(f"a buffer for {elements} of {numel} elements, which move in {grain} at least")
    return elements // grain * grain


def _round_up(gradient: ShardStorage, elements: int) -> int:
    """``elements`` rounded up to what ``gradient`` moves in."""
    return -(-elements // gradient.grain) * gradient.grain


def _front(buffer: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return buffer[: numel * dtype.itemsize].view(dtype)
