"""Gathering of presharded parameters inside a block, before there is an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from zero_ext.comm import Collectives
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.zero.units.collective_errors import DeferredError
from zero_ext.zero.units.dtensor_local import local_tensor, point_at
from zero_ext.zero.units.flat_layout import in_memory_order
from zero_ext.zero.units.parameter_marks import expert_ranks
from zero_ext.zero.units.presharded import REBUILD, PreshardedParameter, presharded_of, set_presharded


@contextlib.contextmanager
def gathered_presharded(parameters: Sequence[nn.Parameter], modifier_rank: int | None) -> Iterator[None]:
    """Gather presharded ``parameters`` inside the block, on every rank; a collective.

    ``modifier_rank`` and the errors are those of :func:`zero_ext.gathered`.
    """
    found = [(parameter, _presharded_of(parameter)) for parameter in parameters]
    for parameter, presharded in found:
        described = f"parameter '{presharded.spec.name}'"
        check_modifier(modifier_rank, presharded.everyone, parameter, described)
    try:
        # Meanwhile they are ordinary parameters, also to an Init that is still open around this block. It
        # watches torch functions, and must not take these here for a use.
        with torch._C.DisableTorchFunction():
            for parameter, presharded in found:
                presharded.detach_from(parameter)
                point_at(parameter, presharded.gather())
        before = [parameter._version for parameter in parameters]
        yield
        if modifier_rank is None:
            _check_only_read(parameters, before)
        else:
            with torch._C.DisableTorchFunction():
                for parameter, presharded in found:
                    _adopt_writes(parameter, presharded, modifier_rank)
    finally:
        with torch._C.DisableTorchFunction():
            for parameter, presharded in found:
                set_presharded(parameter, presharded)


def check_modifier(
    modifier_rank: int | None, collectives: Collectives, parameter: nn.Parameter, described: str
) -> None:
    """Raise ``ValueError`` if a rank's values of ``parameter`` cannot become those of all ``collectives``."""
    if modifier_rank is None:
        return
    if modifier_rank not in range(collectives.world_size):
        raise ValueError(
            f"modifier_rank: expected 0 to {collectives.world_size - 1}, got {modifier_rank!r}. Pass a rank."
        )
    if expert_ranks(parameter):
        raise ValueError(
            f"modifier_rank: {described} holds experts, and rank {modifier_rank} has others than some ranks. "
            "Leave them out, or use zero_ext.load_full_state_dict(strict=False)."
        )


def _presharded_of(parameter: nn.Parameter) -> PreshardedParameter:
    presharded = presharded_of(parameter)
    if presharded is None:
        raise zero_ext_bug("a parameter that is not presharded")
    return presharded


def _check_only_read(parameters: Sequence[nn.Parameter], before: Sequence[int]) -> None:
    for parameter, version in zip(parameters, before, strict=True):
        if parameter._version != version:
            raise RuntimeError(
                f"parameter of shape {tuple(parameter.shape)}: it was written to inside 'with "
                "zero_ext.gathered(params):', which is for reading. Name the rank with the values that "
                "count: "
                "'with zero_ext.gathered(params, modifier_rank=0):'."
            )


def _adopt_writes(parameter: nn.Parameter, presharded: PreshardedParameter, modifier_rank: int) -> None:
    """Store on every rank the shard of the modifier rank's value."""
    value = local_tensor(parameter).detach()
    if tuple(value.shape) != presharded.spec.shape:
        raise RuntimeError(
            f"parameter: expected shape {presharded.spec.shape} at the end of 'with "
            "zero_ext.gathered(...)', got "
            f"{tuple(value.shape)}. Change its values, not its shape."
        )
    collectives = presharded.everyone
    # The broadcast writes to this copy. ``value`` may share memory with a tensor of the user's.
    flat = in_memory_order(value.to(presharded.spec.dtype), presharded.spec).clone()
    collectives.broadcast_(flat, modifier_rank, "an edited parameter of zero_ext.Init")
    failures = DeferredError()
    failures.attempt(lambda: presharded.store_from_full(flat))
    failures.raise_deferred(collectives, "storing an edited parameter of zero_ext.Init", REBUILD)
