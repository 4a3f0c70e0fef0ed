"""Parameters that were sharded at birth, one by one, before any unit exists."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zero_ext.comm import Collectives
from zero_ext.zero.layout import FlatLayout, ParameterSpec, memory_order

ATTRIBUTE = "_zero_ext_born_shard"
GUARDED = ("__deepcopy__", "__reduce_ex__", "share_memory_")


class BornShard:
    """This rank's shard [layout.shard_numel] of one parameter, and how it lies in the whole."""

    def __init__(self, parameter: nn.Parameter, collectives: Collectives) -> None:
        spec = ParameterSpec("", tuple(parameter.shape), memory_order(parameter), parameter.dtype)
        self.layout = FlatLayout.build([spec], collectives.world_size)
        begin, end = self.layout.shard_range(collectives.rank)
        self.shard = torch.zeros(end - begin, dtype=parameter.dtype, device="cpu")
        dtype = self.layout.dtype
        blank = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
        self._memory = torch.full((), blank, dtype=dtype, device="cpu")
        value = parameter.data
        if value.stride() != spec.stride:
            value = value.contiguous()
        flattened = value.as_strided((spec.numel,), (1,), value.storage_offset())
        for overlap in self.layout.overlaps(begin, end):
            part = flattened[overlap.parameter_start : overlap.parameter_start + overlap.numel]
            self.shard[overlap.range_start : overlap.range_start + overlap.numel].copy_(part)

    @property
    def spec(self) -> ParameterSpec:
        """Shape, stride and dtype of the whole."""
        return self.layout.specs[0]

    @property
    def placeholder(self) -> torch.Tensor:
        """What the parameter's data is meanwhile: one NaN (0 for integers) in the true shape."""
        return self._memory.expand(self.spec.shape)

    def replaced_in(self, parameter: nn.Parameter) -> bool:
        """Whether somebody gave ``parameter`` a value while only shards of it existed."""
        if not self.spec.numel:
            return False
        value = self._memory.item()
        blank = value != value or (value == 0 and not self._memory.is_floating_point())
        return (
            parameter.dtype != self._memory.dtype
            or parameter.data_ptr() != self._memory.data_ptr()
            or not blank
        )


def born_shard(parameter: nn.Parameter) -> BornShard | None:
    """The shard of a parameter made by ``zero_ext.Init``; None for one that is whole."""
    found = getattr(parameter, ATTRIBUTE, None)
    return found if isinstance(found, BornShard) else None


def shard_at_birth(parameter: nn.Parameter, collectives: Collectives) -> None:
    """Keeps this rank's shard of ``parameter`` and makes its data a NaN placeholder of the same shape."""
    born = BornShard(parameter, collectives)
    setattr(parameter, ATTRIBUTE, born)
    parameter.data = born.placeholder


def refuse_copies(parameter: nn.Parameter) -> None:
    """Makes ``deepcopy``, pickling and ``share_memory_`` of a parameter sharded at birth an error."""

    def refuse(*_: object) -> Any:
        raise RuntimeError(
            "a parameter from zero_ext.Init cannot be copied or pickled before zero_ext.prepare: this rank "
            "holds only a part of it. Copy inside 'with zero_ext.Init(...)', or call zero_ext.prepare first."
        )

    for name in GUARDED:
        setattr(parameter, name, refuse)


def forget_birth(parameter: nn.Parameter) -> None:
    """Drops the shard and the refusals that came with it."""
    for name in (ATTRIBUTE, *GUARDED):
        vars(parameter).pop(name, None)


def full_value(parameter: nn.Parameter, collectives: Collectives) -> torch.Tensor:
    """The whole value of a parameter sharded at birth; a collective. Ends its being born-sharded."""
    born = born_shard(parameter)
    if born is None:
        raise AssertionError("full_value of a parameter that is whole")
    if born.layout.world_size != collectives.world_size:
        raise RuntimeError(
            f"parameter of shape {tuple(parameter.shape)} was sharded by zero_ext.Init over "
            f"{born.layout.world_size} ranks, and is now prepared over {collectives.world_size}; pass both "
            "the same process group"
        )
    flat = torch.empty(born.layout.numel, dtype=born.layout.dtype, device="cpu")
    collectives.gather(flat, born.shard, "gather_born", "gather of a parameter from zero_ext.Init").wait()
    forget_birth(parameter)
    return flat.as_strided(born.spec.shape, born.spec.stride, 0)
