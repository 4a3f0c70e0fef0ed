"""The units that the engine makes of a planned model: which tensors share one, and how long each is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from zero_ext.config.buffer_sizes import ALIGNMENT_BYTES, STORAGE_ALIGNMENT, flat_offsets
from zero_ext.config.offload import StatePlacement
from zero_ext.plan.simulation.training_setup import PARAMETER_BYTES, Training
from zero_ext.plan.simulation.transformer_cost import ModelCost, TensorGroup
from zero_ext.zero.construction.staging_sizes import bucket_groups, gradient_spans
from zero_ext.zero.memory.unit_spec import UnitSpec

ParameterSpan = tuple[int, int]


@dataclass(frozen=True)
class _Parameter:
    """``elements`` of a parameter in the unit ``unit``.

    The unit is gathered for the parameters ``gathered_for``, and in backward too where that ``rereads`` it.
    ``block`` are the parameters of its block, None outside blocks. Modules at both ends share what is
    ``tied``.
    """

    elements: int
    unit: int
    gathered_for: ParameterSpan
    block: ParameterSpan | None
    rereads: bool
    tied: bool


def unit_elements(model: ModelCost, training: Training) -> Mapping[int, int]:
    """Return elements of a unit's flat buffer, padding included: how many units are that long.

    A shard is a whole number of 64 bytes, and of blocks of 4096 where parameters are in storage: nothing
    besides a large unit, but all of it for the norm at a model's end, which is a unit of its own.
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
    groups: Sequence[TensorGroup], placement: StatePlacement, training: Training
) -> Iterator[UnitSpec]:
    """Yield the units of ``groups``, as staging is planned for them."""
    parameters = _parameters(groups, training.stage == 3)
    spans = gradient_spans([parameter.block for parameter in parameters])
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
        own = [spans[number] for number in unit]
        grads_start = max(last for _, last in own)
        first = parameters[unit[0]]
        yield UnitSpec(
            str(name),
            numel,
            PARAMETER_BYTES,
            training.world_size,
            placement,
            first.gathered_for if placement.params else (min(own)[0], grads_start),
            grads_start,
            min(own),
            rereads=first.rereads,
            shared_bytes=PARAMETER_BYTES * sum(sizes[number] for number in unit if parameters[number].tied),
            largest_bytes=PARAMETER_BYTES * max(sizes[number] for number in unit),
        )


def _lengths(groups: Sequence[TensorGroup], training: Training) -> Counter[int]:
    """See :func:`unit_elements`; groups that are alike are looked at together."""
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


def _padded(sizes: Sequence[int], placement: StatePlacement, ranks: int) -> int:
    """Return elements of the flat buffer of tensors of ``sizes``."""
    stored = placement.params and placement.params_tier == "nvme"
    alignment = STORAGE_ALIGNMENT if stored else ALIGNMENT_BYTES
    return flat_offsets(sizes, PARAMETER_BYTES, ranks, alignment)[1]


def _parameters(groups: Sequence[TensorGroup], tiled: bool) -> list[_Parameter]:
    """In the order of registration: each matrix, perhaps in tiles, with its part of the vectors."""
    sizes = [_tensors(group, tiled) for group in groups]
    ends = list(accumulate(len(tensors) for tensors in sizes))
    found: list[_Parameter] = []
    units = 0
    for group, tensors, end in zip(groups, sizes, ends, strict=True):
        span = end - len(tensors), end - 1
        block = span if group.block else None
        gathered_for = (0, ends[-1] - 1) if group.tied else span
        own = units
        units += 1
        for elements, tile in tensors:
            if tile:
                tile_span = len(found), len(found)
                found.append(_Parameter(elements, units, tile_span, tile_span, not group.looked_up, False))
                units += 1
            else:
                found.append(_Parameter(elements, own, gathered_for, block, not group.looked_up, group.tied))
    return found


def _tensors(group: TensorGroup, tiled: bool) -> list[tuple[int, bool]]:
    """Return elements of each, and whether it is a tile. Parts of the vectors end where no padding is
    needed.
    """
    tiles = group.tiles if tiled else 1
    count, grain = max(1, len(group.matrices)), ALIGNMENT_BYTES // PARAMETER_BYTES
    bounds = [group.vectors * index // count // grain * grain for index in range(count)] + [group.vectors]
    vectors = [end - begin for begin, end in pairwise(bounds)]
    found: list[tuple[int, bool]] = []
    for index, vector in enumerate(vectors):
        if group.matrices:
            matrix = group.matrices[index]
            found += [(-(-matrix // tiles), tiles > 1)] * tiles
        if vector:
            found.append((vector, False))
    return found
