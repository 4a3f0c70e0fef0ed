"""The units that the engine makes of a planned model: which tensors share one, and how long each is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from zero_ext.config.buffer_sizes import ALIGNMENT_BYTES, STORAGE_ALIGNMENT, flat_offsets
from zero_ext.config.state_placement import Placement
from zero_ext.plan.simulation.model_cost import ModelCost, TensorGroup
from zero_ext.plan.simulation.training_setup import PARAMETER_BYTES, Training
from zero_ext.zero.memory.pool_replay import StagedUnit
from zero_ext.zero.memory.staging_sizes import arrive_together, bucket_groups

Span = tuple[int, int]


@dataclass(frozen=True)
class _Parameter:
    """``elements`` in the unit ``unit``, which is gathered for the parameters ``home``, in backward if that
    ``rereads`` it; ``block`` are those of its block, None outside blocks. Modules at both ends share what is
    ``tied``."""

    elements: int
    unit: int
    home: Span
    block: Span | None
    rereads: bool
    tied: bool


def unit_elements(model: ModelCost, training: Training) -> Mapping[int, int]:
    """Elements of a unit's flat buffer, padding included: how many units are that long.

    A shard is a whole number of 64 bytes, and of blocks of 4096 where parameters are in storage: nothing
    beside a large unit, but all of it for the norm at a model's end, which is a unit of its own.
    """
    key = (
        "units",
        training.world_size,
        training.placement.params,
        training.placement.params_tier,
        training.stage == 3,
        training.bucket_elements,
    )
    if key not in model.derived:
        model.derived[key] = _lengths(model.tensor_groups, training)
    return model.derived[key]


def padded_elements(model: ModelCost, training: Training) -> int:
    """Of all units."""
    return sum(numel * units for numel, units in unit_elements(model, training).items())


def planned_units(
    groups: Sequence[TensorGroup], placement: Placement, training: Training
) -> Iterator[StagedUnit]:
    """The units of ``groups``, as staging is planned for them."""
    parameters = _parameters(groups, training.stage == 3)
    together = arrive_together([parameter.block for parameter in parameters])
    sizes = [parameter.elements for parameter in parameters]
    if placement.params:
        members: dict[int, list[int]] = {}
        for number, parameter in enumerate(parameters):
            members.setdefault(parameter.unit, []).append(number)
        units = list(members.values())
    else:
        units = bucket_groups(sizes, training.bucket_elements)
    for name, unit in enumerate(units):
        numel = _padded([sizes[number] for number in unit], placement, training.world_size)
        own = [together[number] for number in unit]
        comes = max(last for _, last in own)
        first = parameters[unit[0]]
        yield StagedUnit(
            str(name),
            numel,
            PARAMETER_BYTES,
            training.world_size,
            placement,
            first.home if placement.params else (min(own)[0], comes),
            comes,
            min(own),
            rereads=first.rereads,
            shared_bytes=PARAMETER_BYTES * sum(sizes[number] for number in unit if parameters[number].tied),
            largest_bytes=PARAMETER_BYTES * max(sizes[number] for number in unit),
        )


def _lengths(groups: Sequence[TensorGroup], training: Training) -> Counter[int]:
    """See :func:`unit_elements`; groups that are alike are looked at once."""
    placement, ranks = training.placement, training.world_size
    found: Counter[int] = Counter()
    if not placement.params:
        sizes = [elements for group in groups for elements, _ in _tensors(group, training.stage == 3)]
        for unit in bucket_groups(sizes, training.bucket_elements):
            found[_padded([sizes[number] for number in unit], placement, ranks)] += 1
        return found
    for group, alike in Counter(groups).items():
        tensors = Counter(_tensors(group, True))
        own = [elements for elements, tile in tensors.elements() if not tile]
        if own:
            found[_padded(own, placement, ranks)] += alike
        for (elements, tile), tiles in tensors.items():
            if tile:
                found[_padded([elements], placement, ranks)] += alike * tiles
    return found


def _padded(sizes: Sequence[int], placement: Placement, ranks: int) -> int:
    """Elements of the flat buffer of tensors of ``sizes``."""
    stored = placement.params and placement.params_tier == "nvme"
    alignment = STORAGE_ALIGNMENT if stored else ALIGNMENT_BYTES
    return flat_offsets(sizes, PARAMETER_BYTES, ranks, alignment)[1]


def _parameters(groups: Sequence[TensorGroup], tiled: bool) -> list[_Parameter]:
    """In the order of registration: each matrix, perhaps in tiles, with its part of the vectors."""
    sizes = [_tensors(group, tiled) for group in groups]
    ends = list(accumulate(len(part) for part in sizes))
    found: list[_Parameter] = []
    units = 0
    for group, part, end in zip(groups, sizes, ends, strict=True):
        span = end - len(part), end - 1
        block = span if group.block else None
        home = (0, ends[-1] - 1) if group.tied else span
        own = units
        units += 1
        for elements, tile in part:
            if tile:
                here = len(found), len(found)
                found.append(_Parameter(elements, units, here, here, not group.looked_up, False))
                units += 1
            else:
                found.append(_Parameter(elements, own, home, block, not group.looked_up, group.tied))
    return found


def _tensors(group: TensorGroup, tiled: bool) -> list[tuple[int, bool]]:
    """Elements of each, and whether it is a tile. Parts of the vectors end where no padding is needed."""
    tiles = group.tiles if tiled else 1
    count, grain = max(1, len(group.matrices)), ALIGNMENT_BYTES // PARAMETER_BYTES
    bounds = [group.vectors * place // count // grain * grain for place in range(count)] + [group.vectors]
    vectors = [end - begin for begin, end in pairwise(bounds)]
    found: list[tuple[int, bool]] = []
    for place, vector in enumerate(vectors):
        if group.matrices:
            matrix = group.matrices[place]
            found += [(-(-matrix // tiles), tiles > 1)] * tiles
        if vector:
            found.append((vector, False))
    return found
