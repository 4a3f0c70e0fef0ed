"""Master weights: the fp32 values that the optimizer updates, for the elements this rank owns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_ext.offload import MASTER, ShardHome, Tiers, Values
from zero_ext.zero.layout import Overlap
from zero_ext.zero.unit import Unit


class MasterShard:
    """The optimizer's view of a unit: of its shard, or of all of it where the optimizer is replicated.

    ``state`` [owned] holds the fp32 master weights and, once an optimizer added them, its moments. If the
    unit computes in fp32 in the same memory, the masters are the parameters themselves and ``output`` is
    None; otherwise ``output`` [owned] is where the parameters, in compute precision, follow them.
    """

    def __init__(self, unit: Unit, tiers: Tiers) -> None:
        layout, placement = unit.layout, unit.placement
        self.unit = unit
        self.begin, self.end = (
            layout.shard_range(unit.collectives.rank) if placement.optimizer else (0, layout.numel)
        )
        live: ShardHome = unit.home if placement.optimizer else tiers.in_memory(unit.flat)
        shared = live.memory(placement.optimizer_tier) if layout.dtype == torch.float32 else None
        self.separate = shared is None
        self.state = tiers.state_home(placement.optimizer_tier, self.end - self.begin, shared)
        self.output: ShardHome | None = live if self.separate else None
        self.overlaps: tuple[Overlap, ...] = tuple(layout.overlaps(self.begin, self.end))

    def fill(self, originals: Sequence[torch.Tensor], present: Sequence[bool] | None = None) -> None:
        """Takes the owned elements of the unit's original parameters, without rounding.

        ``present`` says which of them to take, by default all.
        """
        if not self.separate:
            return
        for begin, end in self.state.spans():
            with self.state.edit(MASTER, begin, end) as values:
                for overlap in self.overlaps:
                    if present is None or present[overlap.index]:
                        self._fill_part(values, begin, overlap, originals[overlap.index])

    def _fill_part(self, values: torch.Tensor, begin: int, overlap: Overlap, original: torch.Tensor) -> None:
        """Writes what ``overlap`` has in the span ``values``, which starts at owned element ``begin``."""
        first = max(begin, overlap.range_start)
        last = min(begin + values.numel(), overlap.range_start + overlap.numel)
        if first >= last:
            return
        spec = self.unit.layout.specs[overlap.index]
        if original.stride() != spec.stride:
            original = torch.empty_strided(spec.shape, spec.stride, dtype=original.dtype).copy_(original)
        flattened = original.as_strided((spec.numel,), (1,), original.storage_offset())
        start = overlap.parameter_start + first - overlap.range_start
        values[first - begin : last - begin].copy_(flattened[start : start + last - first])

    def follow_output(self) -> None:
        """Takes over parameter values that were edited from outside; unedited ones keep their precision."""
        if self.output is None:
            return
        for begin, end in self.state.spans():
            live = self.output.read(begin, end)
            with self.state.edit(MASTER, begin, end) as values:
                edited = values.to(live.dtype) != live
                values[edited] = live[edited].float()

    def write_output(self) -> None:
        """Rounds the master weights into the parameter memory."""
        if self.output is None:
            return
        for begin, end in self.state.spans():
            self.output.store(begin, self.state.read(MASTER, begin, end), self.state.tier)

    def part(self, overlap: Overlap) -> Values:
        """The master weights of one parameter's owned elements, where they lie."""
        return self.state.run(MASTER, overlap.range_start, overlap.range_start + overlap.numel)

    def memory_bytes(self) -> int:
        """Bytes of memory behind masters and moments, those of parameters that are their own masters left
        out."""
        shared = 0 if self.separate else self.state.numel * 4
        return self.state.memory_bytes() - shared
