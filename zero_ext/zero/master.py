"""Master weights: the fp32 values that the optimizer updates, for the elements this rank owns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_ext.zero.layout import Overlap
from zero_ext.zero.pool import allocate
from zero_ext.zero.unit import Unit


class MasterShard:
    """The fp32 master weights of a unit: of its shard, or of all of it where the optimizer is replicated.

    ``values`` [owned] is fp32. If the unit computes in fp32, ``values`` is the parameter memory itself and
    ``output`` is None; otherwise ``output`` [owned] is the parameter memory, in compute precision, that
    follows it.
    """

    def __init__(self, unit: Unit) -> None:
        layout = unit.layout
        self.unit = unit
        self.begin, self.end = (
            layout.shard_range(unit.collectives.rank) if unit.placement.optimizer else (0, layout.numel)
        )
        live = unit.shard if unit.placement.optimizer else unit.flat
        self.separate = layout.dtype != torch.float32
        self.values = allocate(self.end - self.begin, torch.float32) if self.separate else live
        self.output: torch.Tensor | None = live if self.separate else None
        self.overlaps: tuple[Overlap, ...] = tuple(layout.overlaps(self.begin, self.end))

    def fill(self, originals: Sequence[torch.Tensor], present: Sequence[bool] | None = None) -> None:
        """Takes the owned elements of the unit's original parameters, without rounding.

        ``present`` says which of them to take, by default all.
        """
        if not self.separate:
            return
        for overlap in self.overlaps:
            if present is not None and not present[overlap.index]:
                continue
            spec = self.unit.layout.specs[overlap.index]
            original = originals[overlap.index]
            if original.stride() != spec.stride:
                original = torch.empty_strided(spec.shape, spec.stride, dtype=original.dtype).copy_(original)
            flattened = original.as_strided((spec.numel,), (1,), original.storage_offset())
            self.part(overlap).copy_(
                flattened[overlap.parameter_start : overlap.parameter_start + overlap.numel]
            )

    def part(self, overlap: Overlap, of: torch.Tensor | None = None) -> torch.Tensor:
        """The elements of one parameter, in ``values`` or another owned buffer."""
        source = self.values if of is None else of
        return source[overlap.range_start : overlap.range_start + overlap.numel]

    def follow_output(self) -> None:
        """Takes over parameter values that were edited from outside; unedited ones keep their precision."""
        if self.output is None:
            return
        edited = self.values.to(self.output.dtype) != self.output
        self.values[edited] = self.output[edited].float()

    def write_output(self) -> None:
        """Rounds the master weights into the parameter memory."""
        if self.output is not None:
            self.output.copy_(self.values)
