"""The share of a model that one rank of each pipeline stage has, as a model of its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from zero_ext.parallel import split_stages
from zero_ext.plan.models import ModelSpec
from zero_ext.plan.simulation.transformer_cost import ModelCost, TensorGroup, UnitCost


@dataclass(frozen=True)
class Stage:
    """Pipeline stages that are alike: their ``numbers``, their ``layers``, and what a rank has of them."""

    numbers: tuple[int, ...]
    layers: int
    cost: ModelCost

    @cached_property
    def units(self) -> Counter[UnitCost]:
        """Return how many of each kind of unit."""
        return Counter(self.cost.units)


def stages_of(model: ModelSpec, pp: int, tp: int) -> tuple[Stage, ...]:
    """Return the kinds of stages of ``model`` cut into ``pp``, by parameters as a ``PipelineModule`` does by
    default, its tensors shared by ``tp`` ranks. The embedding goes before the layers, the output matrix
    behind; a tied one is in both ends.

    Raises ``ValueError`` for more stages than layers.
    """
    if pp > model.shape.layers:
        raise ValueError(
            f"pp: expected at most {model.shape.layers} stages, one for each layer of {model.name}, got "
            f"{pp}. Lower pp."
        )
    known, key = model.full_cost.derived, ("stages", pp, tp)
    if key not in known:
        cost = model.cost(tp)
        known[key] = tuple(
            Stage(tuple(numbers), layers, _stage_cost(cost, model, first, layers, last))
            for (first, layers, last), numbers in _kinds(model, pp).items()
        )
    found: tuple[Stage, ...] = known[key]
    return found


def _kinds(model: ModelSpec, pp: int) -> dict[tuple[bool, int, bool], list[int]]:
    """Return the stages that have the embedding or not, so many layers, the output matrix or not."""
    known, key = model.full_cost.derived, ("kinds of stages", pp)
    if key not in known:
        kinds = known[key] = {}
        end = model.shape.layers + 1  # counting the embedding as 0
        for number, held in enumerate(_cut(model, pp)):
            layers = len(held) - (0 in held) - (end in held)
            kinds.setdefault((0 in held, layers, end in held), []).append(number)
    found: dict[tuple[bool, int, bool], list[int]] = known[key]
    return found


def _cut(model: ModelSpec, pp: int) -> list[range]:
    """Return the embedding, the layers and the output matrix, counted from 0, of each stage."""
    first, *units, last = model.full_cost.units
    tiles = len(units) // model.shape.layers
    layer = sum(unit.parameters for unit in units[:tiles])
    tied = first.parameters if model.shape.tied else 0
    return split_stages([first.parameters, *[layer] * model.shape.layers, last.parameters + tied], pp)


def _stage_cost(cost: ModelCost, model: ModelSpec, first: bool, layers: int, last: bool) -> ModelCost:
    begin, *units, end = cost.units
    groups = cost.tensor_groups
    blocks = [position for position, group in enumerate(groups) if group.block]
    before, after = groups[: blocks[0]], groups[blocks[-1] + 1 :]
    if model.shape.tied and not (first and last):
        table = before[0]
        before = (replace(table, tied=False, looked_up=True), *before[1:])
        begin = replace(begin, tied=False, looked_up=True)
        after = (*after, TensorGroup(table.matrices))
        end = replace(end, parameters=end.parameters + table.elements)
    tiles = len(units) // model.shape.layers
    return replace(
        cost,
        units=((begin,) if first else ()) + tuple(units[: layers * tiles]) + ((end,) if last else ()),
        groups=(before if first else ()) + groups[blocks[0] : blocks[0] + layers] + (after if last else ()),
    )
