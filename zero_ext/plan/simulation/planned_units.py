"""The units that the engine makes of a planned model, and the staging buffers of a rank for them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from zero_ext.config import ZeroConfig
from zero_ext.config.buffer_sizes import ALIGNMENT_BYTES, flat_offsets
from zero_ext.config.full_tensor_costs import deal_owners, newton_schulz_flops
from zero_ext.config.offload import StatePlacement
from zero_ext.config.optimizer_traits import OPTIMIZERS
from zero_ext.config.tiers import TIERS, is_stored
from zero_ext.plan.simulation.training_setup import PARAMETER_BYTES, UNIT_SIZES, Training
from zero_ext.plan.simulation.transformer_cost import ModelCost, TensorGroup, UnitCost
from zero_ext.zero.construction.staging_sizes import StateStep, bucket_groups, gradient_spans, staging_of
from zero_ext.zero.memory.gathered_unit import UnitSpec
from zero_ext.zero.unshard.pool_replay import gathered_once

# The busiest moment of a stack of like blocks touches a few of them: deeper ones need no more.
_UNITS_AT_ONCE = 8
_MOST_BLOCKS = 64
_MOST_TILES = 5  # of each matrix

ParameterSpan = tuple[int, int]


@dataclass(frozen=True)
class _Parameter:
    """``elements`` of a parameter in the unit ``unit``.

    The unit is gathered for the parameters ``gathered_for``, and in backward too where that ``rereads`` it.
    ``block`` are the parameters of its block, None outside blocks. Modules at both ends share what is
    ``tied``. ``rule`` is the optimizer that steps it, which the others of its unit have too. ``spread`` ranks
    each have another one.
    """

    elements: int
    unit: int
    rule: str
    gathered_for: ParameterSpan
    block: ParameterSpan | None
    rereads: bool
    tied: bool
    spread: int


class _Tensor(NamedTuple):
    """Elements of a tensor of a group, whether it is one of a matrix's tiles, whether a hidden matrix, and
    the number of ranks that each have another one."""

    elements: int
    tile: bool = False
    hidden_matrix: bool = False
    spread: int = 1


class MatrixStep(NamedTuple):
    """A step on full matrices, or on sums over their rows and columns.

    Attributes:
        share: of the model's parameters, that are in such matrices.
        flops: of the rank that has most to do.
        sent: elements of slices that have to go to the owners of their matrices, and back, on all ranks.
        lines: rows and columns of all matrices, where each has a sum.
        vectors: elements of the other parameters, where rows and columns have sums.
    """

    share: float = 0.0
    flops: int = 0
    sent: int = 0
    lines: int = 0
    vectors: int = 0


def unit_elements(model: ModelCost, training: Training, spread: int = 1) -> Mapping[int, int]:
    """Return elements of a unit's flat buffer, padding included: how many units are that long.

    They are those of parameters that ``spread`` ranks each have others of, such as experts.
    """
    found: Counter[int] = Counter()
    for lengths in unit_elements_by_rule(model, training, spread).values():
        found.update(lengths)
    return found


def unit_elements_by_rule(
    model: ModelCost, training: Training, spread: int = 1
) -> Mapping[str, Mapping[int, int]]:
    """Return the units that each optimizer of :attr:`Training.rules` steps, as :func:`unit_elements`.

    A shard is a whole number of 64 bytes, and of blocks of 4096 where parameters are in storage: nothing
    besides a large unit, but all of it for the norm at a model's end, which is a unit of its own.
    """
    training = training.among(spread)
    key = (
        "units",
        spread,
        training.world_size,
        training.placement.params,
        training.placement.params_tier,
        training.stage == 3,
        training.bucket_elements,
        training.rules,
    )
    if key not in model.derived:
        model.derived[key] = _lengths(model.tensor_groups, training, spread)
    found: Mapping[str, Mapping[int, int]] = model.derived[key]
    return found


def padded_elements(model: ModelCost, training: Training, spread: int = 1) -> int:
    """Of all units of :func:`unit_elements`."""
    return sum(numel * units for numel, units in unit_elements(model, training, spread).items())


def matrix_step(model: ModelCost, training: Training) -> MatrixStep:
    """Return what a step works on of full matrices; nothing for optimizers that step elements by themselves.

    Raises ``ValueError`` if an optimizer needs full matrices and their shapes are unknown or the model has
    experts.
    """
    if model.has_experts and (training.needs_full_tensors or OPTIMIZERS[training.optimizer_type].factors):
        raise ValueError(
            f"optimizer_type: expected one that steps elements by themselves for {model.name}, a mixture of "
            f"experts, got {training.optimizer_type}. Choose AdamW."
        )
    if OPTIMIZERS[training.optimizer_type].factors:
        return _lines(model)
    if not training.needs_full_tensors:
        return MatrixStep()
    placement, ranks = training.placement, training.world_size
    key = "matrices", placement, ranks, training.bucket_elements
    if key not in model.derived:
        shapes = list(hidden_matrices(model))
        flops = [newton_schulz_flops(shape) for shape in shapes]
        loads, sent = [sum(flops)], 0
        if placement.optimizer:
            owners = deal_owners(flops, ranks)
            loads = [0] * (max(owners, default=0) + 1)
            for owner, load in zip(owners, flops, strict=True):
                loads[owner] += load
            sent = _elements_sent(model.tensor_groups, owners, training)
        share = sum(map(math.prod, shapes)) / sum(group.elements for group in model.tensor_groups)
        model.derived[key] = MatrixStep(share, max(loads), sent)
    found: MatrixStep = model.derived[key]
    return found


def _lines(model: ModelCost) -> MatrixStep:
    """Return rows and columns of all matrices. Those of unknown shape count as square ones."""
    key = ("lines",)
    if key not in model.derived:
        lines = vectors = 0
        for group, alike in Counter(model.tensor_groups).items():
            sides = [(group.side or math.isqrt(matrix), matrix) for matrix in group.matrices]
            lines += alike * sum(side + -(-matrix // side) for side, matrix in sides if matrix)
            vectors += alike * group.vectors
        model.derived[key] = MatrixStep(lines=lines, vectors=vectors)
    found: MatrixStep = model.derived[key]
    return found


def _elements_sent(groups: Sequence[TensorGroup], owners: Sequence[int], training: Training) -> int:
    """Return the elements of hidden matrices that are in the shards of other ranks than their ``owners``."""
    placement, ranks, sent = training.placement, training.world_size, 0
    blocks = [group.matrices for group in groups if group.block]
    units: list[Sequence[int]] = list(blocks)
    if not placement.params:
        sizes = [matrix for block in blocks for matrix in block]
        units = [
            [sizes[number] for number in unit] for unit in bucket_groups(sizes, training.bucket_elements)
        ]
    remaining = iter(owners)
    for unit in units:
        offsets, numel = flat_offsets(unit, PARAMETER_BYTES, ranks, TIERS[placement.params_tier].alignment)
        shard = numel // ranks
        for size, offset in zip(unit, offsets, strict=True):
            first = next(remaining) * shard
            sent += size - max(0, min(offset + size, first + shard) - max(offset, first))
    return sent


def hidden_matrices(model: ModelCost) -> Iterator[tuple[int, int]]:
    """Yield the shapes of all matrices that are neither embeddings nor output layers.

    Raises ``ValueError`` if they are unknown.
    """
    for group in model.tensor_groups:
        for matrix in group.matrices if group.block else ():
            if not group.side:
                raise ValueError(
                    f"optimizer_type: expected a model with matrices of known shapes, got {model.name}. Pass "
                    "one made from a Transformer, or choose AdamW."
                )
            yield group.side, -(-matrix // group.side)


def planned_units(
    groups: Sequence[TensorGroup], placement: StatePlacement, training: Training
) -> Iterator[UnitSpec]:
    """Yield the units of ``groups``, as staging is planned for them."""
    parameters = _parameters(groups, training)
    spans = gradient_spans([parameter.block for parameter in parameters])
    for spread in sorted({parameter.spread for parameter in parameters}):
        own = training.among(spread)
        yield from _units_of(spread, parameters, spans, placement.on_ranks(own.world_size), own)


def _units_of(
    spread: int,
    parameters: Sequence[_Parameter],
    spans: Sequence[ParameterSpan],
    placement: StatePlacement,
    training: Training,
) -> Iterator[UnitSpec]:
    """Yield the units of the parameters that are ``spread`` over so many ranks."""
    sizes = [parameter.elements for parameter in parameters]
    members: dict[tuple[int, str], list[int]] = {}
    for number, parameter in enumerate(parameters):
        if parameter.spread == spread:
            members.setdefault((parameter.unit if placement.params else 0, parameter.rule), []).append(number)
    units = list(members.values())
    if not placement.params:
        units = [
            [numbers[index] for index in bucket]
            for numbers in units
            for bucket in bucket_groups([sizes[number] for number in numbers], training.bucket_elements)
        ]
    for name, unit in enumerate(units):
        numel = _padded([sizes[number] for number in unit], placement, training.world_size)
        own = [spans[number] for number in unit]
        grads_start = max(last for _, last in own)
        first = parameters[unit[0]]
        yield UnitSpec(
            f"{spread}.{name}",
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


def _lengths(groups: Sequence[TensorGroup], training: Training, spread: int) -> dict[str, Counter[int]]:
    """See :func:`unit_elements_by_rule`; groups that are alike are looked at together."""
    placement, ranks = training.placement, training.world_size
    found: dict[str, Counter[int]] = {rule: Counter() for rule in training.rules}
    if not placement.params:
        for rule, lengths in found.items():
            sizes = [
                tensor.elements
                for group in groups
                for tensor in _tensors(group, training.stage == 3)
                if training.rule_of(tensor.hidden_matrix) == rule and tensor.spread == spread
            ]
            for unit in bucket_groups(sizes, training.bucket_elements):
                lengths[_padded([sizes[number] for number in unit], placement, ranks)] += 1
        return found
    for group, alike in Counter(groups).items():
        own: dict[str, list[int]] = {}
        for tensor in _tensors(group, True):
            rule = training.rule_of(tensor.hidden_matrix)
            if tensor.spread != spread:
                continue
            if tensor.tile:
                found[rule][_padded([tensor.elements], placement, ranks)] += alike
            else:
                own.setdefault(rule, []).append(tensor.elements)
        for rule, sizes in own.items():
            found[rule][_padded(sizes, placement, ranks)] += alike
    return found


def _padded(sizes: Sequence[int], placement: StatePlacement, ranks: int) -> int:
    """Return elements of the flat buffer of tensors of ``sizes``."""
    return flat_offsets(sizes, PARAMETER_BYTES, ranks, TIERS[placement.params_tier].alignment)[1]


def _parameters(groups: Sequence[TensorGroup], training: Training) -> list[_Parameter]:
    """In the order of registration: each matrix, perhaps in tiles, with its part of the vectors."""
    sizes = [_tensors(group, training.stage == 3) for group in groups]
    ends = list(accumulate(len(tensors) for tensors in sizes))
    found: list[_Parameter] = []
    units = 0
    for group, tensors, end in zip(groups, sizes, ends, strict=True):
        span = end - len(tensors), end - 1
        block = span if group.block else None
        gathered_for = (0, ends[-1] - 1) if group.tied else span
        own = units
        units += 1
        for tensor in tensors:
            rule, rereads = training.rule_of(tensor.hidden_matrix), not group.looked_up
            if tensor.tile:
                tile = len(found), len(found)
                found.append(_Parameter(tensor.elements, units, rule, tile, tile, rereads, False, 1))
                units += 1
            else:
                found.append(
                    _Parameter(
                        tensor.elements, own, rule, gathered_for, block, rereads, group.tied, tensor.spread
                    )
                )
    return found


def _tensors(group: TensorGroup, tiled: bool) -> list[_Tensor]:
    """Return the tensors of a group. Parts of the vectors end where no padding is needed."""
    tiles = group.tiles if tiled else 1
    count, grain = max(1, len(group.matrices)), ALIGNMENT_BYTES // PARAMETER_BYTES
    bounds = [group.vectors * index // count // grain * grain for index in range(count)] + [group.vectors]
    vectors = [end - begin for begin, end in pairwise(bounds)]
    found: list[_Tensor] = []
    for index, vector in enumerate(vectors):
        beside = [_Tensor(vector)] if vector else []
        if group.matrices:
            matrix = [_Tensor(-(-group.matrices[index] // tiles), tiles > 1, group.block)] * tiles
            beside = [*beside, *matrix] if group.vectors_first else [*matrix, *beside]
        found += beside
    return found + [_Tensor(stack, spread=group.spread) for stack in group.experts]


def staging_bytes(
    model: ModelCost, training: Training, accelerated: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """Return bytes by use that :func:`zero_ext.prepare` sets aside on one rank of ``training`` for
    what passes through, on the device and in host memory; ``accelerated``: the device is not the processor.

    Stacks are cut to the blocks that a busiest moment can touch.
    """
    key = "staging", _what_counts(training), accelerated
    if key not in model.derived:
        placement = training.placement
        if training.uses_up_gradients:
            placement = placement.consuming_gradients(training.world_size)
        found = staging_of(
            _shallow_units(model, placement, training),
            config_of(training),
            StateStep(
                True,
                OPTIMIZERS[training.optimizer_type].on_nvme == "pipeline",
                tuple(nbytes for nbytes, _ in training.state_fields()),
            ),
            used_up=training.uses_up_gradients,
            accelerated=accelerated,
        )
        device, host = {"passing through": found.pool.nbytes, "autograd": found.autograd}, dict[str, int]()
        for tier, nbytes in ((device, sum(found.step_buffers["device"])), (host, found.host)):
            if nbytes:
                tier["staging"] = nbytes
        model.derived[key] = device, host
    staging: tuple[dict[str, int], dict[str, int]] = model.derived[key]
    return staging


def lengths_gathered_once(model: ModelCost, training: Training, spread: int = 1) -> Counter[int]:
    """Return elements of a unit's flat buffer: how many units that long a step gathers for forward alone, as
    :func:`unit_elements`."""
    if not training.among(spread).placement.params:
        return Counter()
    key = "gathered once", spread, _what_counts(training)
    if key not in model.derived:
        units = gathered_once(_shallow_units(model, training.placement, training), config_of(training))
        ranks = training.among(spread).world_size
        model.derived[key] = Counter(unit.numel for unit in units if unit.world_size == ranks)
    return model.derived[key]


def unit_specs(units: Sequence[UnitCost], training: Training) -> list[UnitSpec]:
    """Return ``units``, each a unit of the engine, as the engine describes them."""
    last = len(units) - 1
    own = {unit.spread: training.among(unit.spread) for unit in set(units)}
    return [
        UnitSpec(
            str(number),
            unit.parameters,
            PARAMETER_BYTES,
            own[unit.spread].world_size,
            own[unit.spread].placement,
            gathered=(0, last) if unit.tied else (number, number),
            grads_start=number,
            grads_end=(number, number),
            rereads=not unit.looked_up,
        )
        for number, unit in enumerate(units)
    ]


def _what_counts(training: Training) -> Training:
    """Return the same with one value for what staging does not depend on."""
    steps = min(training.accumulation_steps, 2)
    return replace(training, micro_batch=1, accumulation_steps=steps, in_flight=1, activations="saved")


def config_of(training: Training) -> ZeroConfig:
    """Return the configuration of a run with ``training``."""
    paths = {"nvme_paths": ["/"]} if is_stored(*training.tiers.values()) else {}
    return ZeroConfig.from_mapping(
        {
            "stage": training.stage,
            "precision": {"dtype": "bf16", "moments_dtype": training.moments_dtype},
            "batch": {"gradient_accumulation_steps": training.accumulation_steps},
            "gradient_clipping": float(training.clipping),
            "units": {name: getattr(training, name) for name in UNIT_SIZES},
            "offload": {
                **training.tiers,
                **paths,
                "update_mode": training.update_mode,
                "staging_buffer_bytes": training.staging_buffer_bytes,
            },
        }
    )


def _shallow_units(model: ModelCost, placement: StatePlacement, training: Training) -> tuple[UnitSpec, ...]:
    groups = tuple(_shallow(model.tensor_groups, training))
    return tuple(planned_units(groups, placement, training))


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
