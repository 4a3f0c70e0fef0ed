"""Parameters from ``zero_ext.Init`` made whole for a moment, before there is an engine to gather them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from zero_ext.comm import Collectives
from zero_ext.zero.units.deferred_errors import Postponed
from zero_ext.zero.units.flat_layout import in_memory_order
from zero_ext.zero.units.presharded import REBUILD, BornShard, born_shard, set_born


@contextlib.contextmanager
def gathered_born(parameters: Sequence[nn.Parameter], modifier_rank: int | None) -> Iterator[None]:
    """Makes ``parameters``, sharded by :class:`zero_ext.Init` and not prepared yet, whole inside the block,
    on every rank; a collective. ``modifier_rank`` and the errors are those of :func:`zero_ext.gathered`.
    """
    births = [(parameter, _born(parameter)) for parameter in parameters]
    for _, born in births:
        if modifier_rank is not None and modifier_rank not in range(born.collectives.world_size):
            raise ValueError(
                f"modifier_rank: {modifier_rank!r} given, a rank from 0 to {born.collectives.world_size - 1} "
                "wanted"
            )
    try:
        # Meanwhile they are ordinary parameters, also to an Init that is still open around this block. It
        # watches torch functions, and must not take these here for a use.
        with torch._C.DisableTorchFunction():
            for parameter, born in births:
                born.detach_from(parameter)
                parameter.data = born.whole()
        before = [parameter._version for parameter in parameters]
        yield
        if modifier_rank is None:
            _check_only_read(parameters, before)
        else:
            with torch._C.DisableTorchFunction():
                for parameter, born in births:
                    _take_over(parameter, born, modifier_rank)
    finally:
        with torch._C.DisableTorchFunction():
            for parameter, born in births:
                set_born(parameter, born)


def _born(parameter: nn.Parameter) -> BornShard:
    born = born_shard(parameter)
    if born is None:
        raise AssertionError("a parameter that was not sharded at birth")
    return born


def _check_only_read(parameters: Sequence[nn.Parameter], before: Sequence[int]) -> None:
    for parameter, version in zip(parameters, before, strict=True):
        if parameter._version != version:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} was written to inside 'with "
                "zero_ext.gathered(params):', which is for reading; say whose values count: "
                "'with zero_ext.gathered(params, modifier_rank=0):'"
            )


def _take_over(parameter: nn.Parameter, born: BornShard, modifier_rank: int) -> None:
    """Everybody's shard becomes that of the modifier's value."""
    if tuple(parameter.shape) != born.spec.shape:
        raise RuntimeError(
            f"a parameter of shape {born.spec.shape} has shape {tuple(parameter.shape)} at the end of 'with "
            "zero_ext.gathered(...)'; change its values, not its shape"
        )
    collectives: Collectives = born.collectives
    flat = in_memory_order(parameter.detach().to(born.spec.dtype), born.spec).clone()
    collectives.broadcast_(flat, modifier_rank, "an edited parameter of zero_ext.Init")
    failures = Postponed()
    failures.attempt(lambda: born.replace_own(flat))
    if born.home.tier == "nvme":
        failures.settle(collectives, "storing an edited parameter of zero_ext.Init", REBUILD)
