"""Reference models of TRL that follow the policy, shard by shard."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zero_ext.config.tiers import is_stored
from zero_ext.offload import put
from zero_ext.zero.api.engine_lookup import engine_of
from zero_ext.zero.units.collective_errors import raise_on_all_ranks
from zero_ext.zero.units.unit import Unit

# Of shards on NVMe a chunk of each model is in memory.
_CHUNK_ELEMENTS = 4 << 20
_LOAD = "Some of its values are now mixed and some are not. Load the last checkpoint."


def mix_by_shards(model: nn.Module, reference: nn.Module, callbacks: list[Any]) -> None:
    """Have TRL's callback for ``sync_ref_model`` mix the shards of a sharded ``model`` and its ``reference``,
    where it is among ``callbacks``: the callback itself writes to full parameters. ``ValueError`` if the two
    are not sharded alike."""
    for callback in callbacks:
        if hasattr(callback, "sync_target_model"):
            _check_alike(model, reference)
            callback.sync_target_model = mix


def _check_alike(model: nn.Module, reference: nn.Module) -> None:
    layouts = [[_layout(unit) for unit in engine_of(each).units] for each in (model, reference)]
    if layouts[0] != layouts[1]:
        raise ValueError(
            "sync_ref_model: expected a reference model with the units of the model, got others. Train all "
            "parameters of a block, and use a reference model of the same shapes."
        )


def _layout(unit: Unit) -> tuple[object, ...]:
    shapes = tuple((spec.shape, spec.stride) for spec in unit.layout.specs)
    return shapes, unit.layout.offsets, unit.layout.numel, unit.placement.params


def mix(model: nn.Module, reference: nn.Module, alpha: float) -> None:
    """Make ``alpha`` times the parameters of ``model``, and the rest of the earlier values, those of
    ``reference``, on each rank's shards, as TRL does with full parameters; a collective."""
    source, target = engine_of(model), engine_of(reference)
    source.finish_updates()
    target.prefetcher.forget_values()  # what was fetched ahead has the values before
    pairs = list(zip(source.units, target.units, strict=True))

    def mix_units() -> None:
        for own, other in pairs:
            _mix_unit(own, other, alpha)

    stored = is_stored(*(unit.storage.tier for unit in (*source.units, *target.units)))
    with torch.no_grad():
        raise_on_all_ranks(target.collectives, mix_units, "mixing the reference model", _LOAD, stored)


def _mix_unit(source: Unit, target: Unit, alpha: float) -> None:
    if not target.placement.params:
        target.flat.mul_(1.0 - alpha).add_(source.flat, alpha=alpha)
        return
    target.invalidate()
    for begin in range(0, target.storage.numel, _CHUNK_ELEMENTS):
        end = min(begin + _CHUNK_ELEMENTS, target.storage.numel)
        values = target.storage.read(begin, end)  # live, or a copy from NVMe
        values.mul_(1.0 - alpha).add_(source.storage.read(begin, end), alpha=alpha)
        put(target.storage, begin, values, "host")
