"""The staging buffers of a rank: the engine's own formula, over the tensors of a planned model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from zero_ext.config import ZeroConfig
from zero_ext.plan.simulation.planned_units import planned_units
from zero_ext.plan.simulation.training_setup import PARAMETER_BYTES, Training
from zero_ext.plan.simulation.transformer_cost import ModelCost, TensorGroup, UnitCost
from zero_ext.zero.construction.staging_sizes import StateStep, staging_of
from zero_ext.zero.memory.gathered_unit import UnitSpec
from zero_ext.zero.unshard.pool_replay import gathered_once

# The busiest moment of a stack of like blocks touches a few of them: deeper ones need no more.
_UNITS_AT_ONCE = 8
_MOST_BLOCKS = 64
_MOST_TILES = 5  # of each matrix


@dataclass(frozen=True)
class StagingBytes:
    """Bytes of a rank: ``pool`` and ``step_buffers`` on the device, staging in ``host`` memory, and gradients
    that ``autograd`` holds on the device."""

    pool: int
    step_buffers: int
    host: int
    autograd: int


def staging_bytes(model: ModelCost, training: Training, accelerated: bool) -> StagingBytes:
    """Return what :func:`zero_ext.prepare` with AdamW sets aside on one rank of ``training`` for what passes
    through; ``accelerated``: the device is not the processor.

    Stacks are cut to the blocks that a busiest moment can touch.
    """
    key = _what_counts(training), accelerated
    if key not in model.derived:
        config = config_of(training)
        placement = training.placement.consuming_gradients(training.world_size)
        placement = placement if training.uses_up_gradients else training.placement
        groups = tuple(_shallow(model.tensor_groups, training))
        found = staging_of(
            tuple(planned_units(groups, placement, training)),
            config,
            StateStep(True, True, tuple(nbytes for nbytes, _ in training.state_fields)),
            used_up=training.uses_up_gradients,
            accelerated=accelerated,
        )
        model.derived[key] = StagingBytes(
            found.pool.nbytes, sum(found.step_buffers["device"]), found.host, found.autograd
        )
    return model.derived[key]


def lengths_gathered_once(model: ModelCost, training: Training) -> Counter[int]:
    """Return elements of a unit's flat buffer: how many units that long a step gathers for forward alone."""
    if not training.placement.params:
        return Counter()
    key = "gathered once", _what_counts(training)
    if key not in model.derived:
        groups = tuple(_shallow(model.tensor_groups, training))
        units = tuple(planned_units(groups, training.placement, training))
        model.derived[key] = Counter(unit.numel for unit in gathered_once(units, config_of(training)))
    return model.derived[key]


def unit_specs(units: Sequence[UnitCost], training: Training) -> list[UnitSpec]:
    """Return ``units``, each a unit of the engine, as the engine describes them."""
    last = len(units) - 1
    return [
        UnitSpec(
            str(number),
            unit.parameters,
            PARAMETER_BYTES,
            training.world_size,
            training.placement,
            gathered=(0, last) if unit.tied else (number, number),
            grads_start=number,
            grads_end=(number, number),
            rereads=not unit.looked_up,
        )
        for number, unit in enumerate(units)
    ]


def _what_counts(training: Training) -> tuple[Any, ...]:
    return (
        training.world_size,
        training.placement,
        training.stage,
        training.accumulation_steps > 1,
        training.update_mode,
        training.clipping,
        training.moments_dtype,
        training.prefetch_elements,
        training.reuse_elements,
        training.bucket_elements,
        training.max_live_elements,
        training.staging_buffer_bytes,
    )


def config_of(training: Training) -> ZeroConfig:
    """Return the configuration of a run with ``training``."""
    offload = {kind: getattr(training, kind) for kind in ("params", "grads", "optimizer")}
    paths = {"nvme_paths": ["/"]} if "nvme" in offload.values() else {}
    return ZeroConfig.from_mapping(
        {
            "stage": training.stage,
            "precision": {"dtype": "bf16", "moments_dtype": training.moments_dtype},
            "batch": {"gradient_accumulation_steps": training.accumulation_steps},
            "gradient_clipping": float(training.clipping),
            "units": {
                "prefetch_elements": training.prefetch_elements,
                "reuse_elements": training.reuse_elements,
                "bucket_elements": training.bucket_elements,
                "max_live_elements": training.max_live_elements,
            },
            "offload": {
                **offload,
                **paths,
                "update_mode": training.update_mode,
                "staging_buffer_bytes": training.staging_buffer_bytes,
            },
        }
    )


def _shallow(groups: Sequence[TensorGroup], training: Training) -> Iterator[TensorGroup]:
    for group, like in groupby(groups):
        count = len(list(like))
        if group.block:
            sharded = training.stage == 3
            tiled = sharded and group.tiles > 1
            units = 1 + len(group.matrices) * min(group.tiles, _MOST_TILES) if tiled else 1
            ahead = training.prefetch_elements if sharded else _UNITS_AT_ONCE * training.bucket_elements
            most = 1 + -(-_UNITS_AT_ONCE // units) + -(-ahead // max(1, group.elements))
            count = min(count, most, _MOST_BLOCKS)
        yield from [_with_few_tiles(group)] * count


def _with_few_tiles(group: TensorGroup) -> TensorGroup:
    """Return the same with fewer tiles of the same size."""
    if group.tiles <= _MOST_TILES:
        return group
    few = tuple(-(-matrix // group.tiles) * _MOST_TILES for matrix in group.matrices)
    return replace(group, matrices=few, tiles=_MOST_TILES)
