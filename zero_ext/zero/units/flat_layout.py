"""Layout of parameters in a unit's flat buffer, and its division into shards. Pure arithmetic."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zero_ext.config.buffer_sizes import ALIGNMENT_BYTES, flat_offsets
from zero_ext.optim import Segment


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter as its unit stores it: full name, shape, stride (memory order) and compute dtype."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class FlatLayout:
    """Offsets of a unit's parameters in a flat buffer of ``numel`` elements, shared by ``world_size`` ranks.
    Every parameter starts on a 64-byte boundary; the buffer is padded to a multiple of ``world_size * 64``
    bytes (more where shards are on NVMe), so every shard is equally long and aligned as well."""

    specs: tuple[ParameterSpec, ...]
    offsets: tuple[int, ...]
    numel: int
    world_size: int
    dtype: torch.dtype

    @staticmethod
    def build(
        specs: Sequence[ParameterSpec], world_size: int, shard_alignment: int = ALIGNMENT_BYTES
    ) -> FlatLayout:
        """Lay out ``specs`` (all of one dtype, at least one) for ``world_size`` ranks. Shards begin at
        multiples of ``shard_alignment`` bytes. A shard on NVMe is read directly into the flat buffer, which
        requires full blocks."""
        if world_size < 1:
            raise ValueError(f"world_size: expected at least 1, got {world_size}. Pass the number of ranks.")
        dtypes = {spec.dtype for spec in specs}
        if len(dtypes) != 1:
            raise ValueError(
                f"unit: expected parameters of one dtype, got {sorted(map(str, dtypes))}. Build one "
                "unit for each dtype."
            )
        dtype = dtypes.pop()
        sizes = [spec.numel for spec in specs]
        offsets, numel = flat_offsets(sizes, dtype.itemsize, world_size, shard_alignment)
        return FlatLayout(tuple(specs), tuple(offsets), numel, world_size, dtype)

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard."""
        return self.numel // self.world_size

    @property
    def nbytes(self) -> int:
        """Bytes of the full flat buffer in the compute dtype."""
        return self.numel * self.dtype.itemsize

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Return the first element of ``rank``'s shard and the one after its last."""
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank: expected 0 to {self.world_size - 1}, got {rank}. Pass a rank of the group."
            )
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def segments(self, begin: int, end: int) -> list[Segment]:
        """Return the segments of parameters in ``[begin, end)`` of the flat buffer, in order."""
        found = []
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            first, last = max(begin, offset), min(end, offset + spec.numel)
            if first < last:
                found.append(
                    Segment(
                        spec.name,
                        first - offset,
                        first - begin,
                        last - first,
                        shape=spec.shape,
                        stride=spec.stride,
                    )
                )
        return found

    @functools.cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """The padding: ranges of the flat buffer that belong to no parameter."""
        ends = [offset + spec.numel for spec, offset in zip(self.specs, self.offsets, strict=True)]
        starts = [*self.offsets[1:], self.numel]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the stride that ``tensor`` has in a flat buffer: its own if dense, else contiguous."""
    if tensor.numel() == 0 or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return torch.empty(tensor.shape, device="meta").stride()
    return tensor.stride()


def in_memory_order(tensor: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    """Return the elements of ``tensor`` [spec.shape] in the memory order of ``spec``, flat [numel]. It is a
    view if the strides are equal, else a copy."""
    if tensor.stride() != spec.stride:
        ordered = torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype, device=tensor.device)
        tensor = ordered.copy_(tensor)
    return tensor.as_strided((spec.numel,), (1,), tensor.storage_offset())
