"""Parameters that were sharded at birth, one by one, before any unit exists."""

from __future__ import annotations

import torch
from torch import nn

from zero_ext.comm import Collectives
from zero_ext.zero.layout import FlatLayout, ParameterSpec, memory_order

ATTRIBUTE = "_zero_ext_born_shard"


class BornShard:
    """This rank's shard [layout.shard_numel] of one parameter, and how it lies in the whole."""

    def __init__(self, parameter: nn.Parameter, collectives: Collectives) -> None:
        spec = ParameterSpec("", tuple(parameter.shape), memory_order(parameter), parameter.dtype)
        self.layout = FlatLayout.build([spec], collectives.world_size)
        begin, end = self.layout.shard_range(collectives.rank)
        self.shard = torch.zeros(end - begin, dtype=parameter.dtype)
        value = parameter.data
        if value.stride() != spec.stride:
            value = value.contiguous()
        flattened = value.as_strided((spec.numel,), (1,), value.storage_offset())
        for overlap in self.layout.overlaps(begin, end):
            part = flattened[overlap.parameter_start : overlap.parameter_start + overlap.numel]
            self.shard[overlap.range_start : overlap.range_start + overlap.numel].copy_(part)


def is_born_sharded(parameter: nn.Parameter) -> bool:
    """Whether only a shard of ``parameter`` exists, made by ``zero_ext.Init``."""
    return hasattr(parameter, ATTRIBUTE)


def shard_at_birth(parameter: nn.Parameter, collectives: Collectives) -> None:
    """Keeps this rank's shard of ``parameter`` and makes its data a NaN placeholder of the same shape."""
    setattr(parameter, ATTRIBUTE, BornShard(parameter, collectives))
    blank = float("nan") if parameter.dtype.is_floating_point else 0
    parameter.data = torch.full((), blank, dtype=parameter.dtype).expand(parameter.shape)


def full_value(parameter: nn.Parameter, collectives: Collectives) -> torch.Tensor:
    """The whole value of a parameter sharded at birth; a collective. Ends its being born-sharded."""
    born: BornShard = getattr(parameter, ATTRIBUTE)
    if born.layout.world_size != collectives.world_size:
        raise RuntimeError(
            f"parameter of shape {tuple(parameter.shape)} was sharded by zero_ext.Init over "
            f"{born.layout.world_size} ranks, and is now prepared over {collectives.world_size}; pass "
            f"both the "
            "same process group"
        )
    flat = torch.empty(born.layout.numel, dtype=parameter.dtype)
    collectives.gather(flat, born.shard, "gather_born", "gather of a parameter from zero_ext.Init").wait()
    delattr(parameter, ATTRIBUTE)
    spec = born.layout.specs[0]
    return flat.as_strided(spec.shape, spec.stride, 0)
