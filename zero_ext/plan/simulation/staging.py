"""What passes through a rank's memory: the engine's own formula, over the tensors of a planned model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

from zero_ext.config import ZeroConfig
from zero_ext.config.placement import Placement
from zero_ext.config.rooms import ALIGNMENT_BYTES, STORAGE_ALIGNMENT, flat_offsets
from zero_ext.plan.simulation.shapes import ModelCost, TensorGroup
from zero_ext.plan.simulation.training import PARAMETER_BYTES, Training
from zero_ext.zero.pool_replay import StagedUnit
from zero_ext.zero.staging import StateStep, arrive_together, bucket_groups, staging_of

# The busiest moment of a stack of like blocks touches a few of them: deeper ones need no more.
_UNITS_AT_ONCE = 8
_MOST_BLOCKS = 64
_MOST_TILES = 5  # of each matrix
_MOMENTS = {"fp32": (4, 4), "bf16": (2, 2), "8bit": (1, 4, 1, 4)}  # bytes of each kind of state
Span = tuple[int, int]


@dataclass(frozen=True)
class StagingBytes:
    """Bytes of a rank: the ``pool`` and ``rooms`` of steps on the device, and what is in ``host`` memory."""

    pool: int
    rooms: int
    host: int


@dataclass(frozen=True)
class _Parameter:
    """``elements`` in the unit ``unit``, which is gathered for the parameters ``home``; ``block`` are those
    of its block, None outside blocks."""

    elements: int
    unit: int
    home: Span
    block: Span | None


def staging_bytes(model: ModelCost, training: Training, accelerated: bool) -> StagingBytes:
    """What :func:`zero_ext.prepare` with AdamW sets aside on one rank of ``training`` for what passes
    through; ``accelerated``: the device is not the processor.

    Stacks are cut to the blocks that a busiest moment can touch.
    """
    key = _what_counts(training), accelerated
    if key not in model.staged:
        config = _config(training)
        placement = training.placement.using_up(training.world_size)
        placement = placement if training.uses_up_gradients else training.placement
        parameters = _parameters(_shallow(model.tensor_groups, training), training.stage == 3)
        found = staging_of(
            tuple(_units(parameters, placement, training)),
            config,
            StateStep(True, True, (4, *_MOMENTS[training.moments_dtype])),
            used_up=training.uses_up_gradients,
            accelerated=accelerated,
        )
        model.staged[key] = StagingBytes(found.pool.nbytes, sum(found.rooms["device"]), found.host)
    return model.staged[key]


def _what_counts(training: Training) -> tuple[Any, ...]:
    return (
        training.world_size,
        training.placement,
        training.stage,
        training.accumulation_steps > 1,
        training.step,
        training.clipping,
        training.moments_dtype,
        training.prefetch_elements,
        training.bucket_elements,
        training.live_elements,
        training.ring_bytes,
    )


def _config(training: Training) -> ZeroConfig:
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
                "bucket_elements": training.bucket_elements,
                "live_elements": training.live_elements,
            },
            "offload": {**offload, **paths, "step": training.step, "ring_bytes": training.ring_bytes},
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
    """The same with fewer tiles of the same size."""
    if group.tiles <= _MOST_TILES:
        return group
    few = tuple(-(-matrix // group.tiles) * _MOST_TILES for matrix in group.matrices)
    return replace(group, matrices=few, tiles=_MOST_TILES)


def _parameters(groups: Iterator[TensorGroup], tiled: bool) -> list[_Parameter]:
    """In the order of registration: each matrix, perhaps in tiles, with its part of the vectors."""
    listed = list(groups)
    sizes = [_tensors(group, tiled) for group in listed]
    ends = list(accumulate(len(part) for part in sizes))
    found: list[_Parameter] = []
    units = 0
    for group, part, end in zip(listed, sizes, ends, strict=True):
        span = end - len(part), end - 1
        block = span if group.block else None
        home = (0, ends[-1] - 1) if group.tied else span
        own = units
        units += 1
        for elements, tile in part:
            if tile:
                here = len(found), len(found)
                found.append(_Parameter(elements, units, here, here))
                units += 1
            else:
                found.append(_Parameter(elements, own, home, block))
    return found


def _tensors(group: TensorGroup, tiled: bool) -> list[tuple[int, bool]]:
    """Elements of each, and whether it is a tile."""
    tiles = group.tiles if tiled else 1
    count = max(1, len(group.matrices))
    vectors = [
        group.vectors * (place + 1) // count - group.vectors * place // count for place in range(count)
    ]
    found: list[tuple[int, bool]] = []
    for place, vector in enumerate(vectors):
        if group.matrices:
            matrix = group.matrices[place]
            found += [(-(-matrix // tiles), tiles > 1)] * tiles
        if vector:
            found.append((vector, False))
    return found


def _units(
    parameters: Sequence[_Parameter], placement: Placement, training: Training
) -> Iterator[StagedUnit]:
    together = arrive_together([parameter.block for parameter in parameters])
    sizes = [parameter.elements for parameter in parameters]
    if placement.params:
        members: dict[int, list[int]] = {}
        for number, parameter in enumerate(parameters):
            members.setdefault(parameter.unit, []).append(number)
        groups = list(members.values())
    else:
        groups = bucket_groups(sizes, training.bucket_elements)
    stored = placement.params and placement.params_tier == "nvme"
    alignment = STORAGE_ALIGNMENT if stored else ALIGNMENT_BYTES
    for name, group in enumerate(groups):
        _, numel = flat_offsets(
            [sizes[number] for number in group], PARAMETER_BYTES, training.world_size, alignment
        )
        own = [together[number] for number in group]
        comes = max(last for _, last in own)
        gathered = parameters[group[0]].home if placement.params else (min(own)[0], comes)
        yield StagedUnit(
            str(name), numel, PARAMETER_BYTES, training.world_size, placement, gathered, comes, min(own)
        )
