"""The parts in which an optimizer step runs where its state lies: whole, or through fixed staging memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from zero_ext.config import Tier
from zero_ext.offload.shard_home import STORAGE_ALIGNMENT, ShardHome, allocate
from zero_ext.offload.transfers import TransferLog

_GRAIN = STORAGE_ALIGNMENT // 2  # elements of whole blocks in storage, in 2 bytes or more each


class StepPart(NamedTuple):
    """Elements [begin, end) of a range: their gradients, and room for their updated parameters if wanted,
    both in memory of the tier where the state lies."""

    begin: int
    end: int
    gradient: torch.Tensor
    output: torch.Tensor | None
    staged: torch.Tensor | None = None  # ``output`` if it is staging memory, all of which is sent on


class StepStaging:
    """Memory of fixed size through which gradients come to, and parameters leave, a step in another tier.

    ``nbytes`` holds one part: fp32 gradients and fp32 parameters of ``elements`` elements at most. It is
    allocated at its first use, since a step in the tier of its gradients and parameters needs none.
    """

    def __init__(self, nbytes: int, transfers: TransferLog) -> None:
        elements = nbytes // 8
        self.elements = elements // _GRAIN * _GRAIN or elements
        self._transfers = transfers
        self._gradients: torch.Tensor | None = None
        self._outputs: torch.Tensor | None = None

    def parts(self, tier: Tier, gradient: ShardHome, output: ShardHome | None) -> Iterator[StepPart]:
        """The parts of a range [n] whose state lies in memory of ``tier``: one where all else does, too.

        What a part's ``output`` holds, all of it, replaces that part of ``output`` when the next part is
        asked for.
        """
        in_place = output.memory(tier) if output is not None else None
        near = gradient.memory(tier)
        if near is not None and (output is None or in_place is not None):
            yield StepPart(0, gradient.numel, near, in_place)
            return
        for begin in range(0, gradient.numel, self.elements):
            end = min(begin + self.elements, gradient.numel)
            part = self.bring(gradient, begin, end, tier)
            if output is None or in_place is not None:
                yield StepPart(begin, end, part, None if in_place is None else in_place[begin:end])
                continue
            room = self._room("_outputs", end - begin, output.dtype)
            yield StepPart(begin, end, part, room, staged=room)
            output.store(begin, room, tier)

    def bring(self, gradient: ShardHome, begin: int, end: int, tier: Tier) -> torch.Tensor:
        """Elements [begin, end) in memory of ``tier``: where they lie there, else copied, until the next
        call. ``begin`` is a multiple of ``elements`` or the gradient's grain, and they are no more than
        ``elements``."""
        near = gradient.memory(tier)
        if near is not None:
            return near[begin:end]
        whole = -(-(end - begin) // gradient.grain) * gradient.grain
        room = self._room("_gradients", whole, gradient.dtype)
        gradient.fetch(room, begin, tier).wait()
        return room[: end - begin]

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        return sum(room.nbytes for room in (self._gradients, self._outputs) if room is not None)

    def _room(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        room: torch.Tensor | None = getattr(self, name)
        if room is None or room.nbytes < numel * dtype.itemsize:
            room = allocate(self.elements, dtype).view(torch.uint8)
            setattr(self, name, room)
        return room[: numel * dtype.itemsize].view(dtype)
