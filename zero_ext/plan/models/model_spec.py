"""A model to plan for: a transformer's shape, perhaps stretched to a number of parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from zero_ext.plan.simulation.transformer_cost import ModelCost, TensorGroup, Transformer, UnitCost

LARGEST_TILE = 1_000_000_000  # elements; 2 GB in 16 bits


@dataclass(frozen=True)
class ModelSpec:
    """The model that is planned for.

    Attributes:
        shape: its sizes; ``tiles`` is the number of units that a layer is cut into in stage 3.
        parameters: elements in all. Where the shape has others, every unit is scaled.
        source: what the model was read from, in words.
    """

    shape: Transformer
    parameters: int
    source: str

    @classmethod
    def of_shape(cls, shape: Transformer, source: str, parameters: int = 0) -> ModelSpec:
        """``shape`` with layers cut into tiles that are not too large; ``parameters`` 0 takes its own."""
        layer = sum(shape.layer_matrices)
        tiles = max(shape.tiles, -(-layer // LARGEST_TILE))
        shape = replace(shape, tiles=tiles)
        return cls(shape, parameters or shape.cost().parameters, source)

    @property
    def name(self) -> str:
        """For tables."""
        return self.shape.name

    def with_sequence(self, sequence: int) -> ModelSpec:
        """Return the same with samples of ``sequence`` tokens."""
        return replace(self, shape=replace(self.shape, sequence=sequence))

    @cached_property
    def _own_cost(self) -> ModelCost:
        return self.shape.cost()

    @cached_property
    def full_cost(self) -> ModelCost:
        """All units."""
        return self.cost()

    def cost(self, tp_size: int = 1) -> ModelCost:
        """Return all units as one of ``tp_size`` ranks has them that share every layer's tensors. Tensors
        that are split are not cut into tiles.
        """
        tiles = 1 if tp_size > 1 else self.shape.tiles
        cost = self._own_cost
        if tp_size > 1:
            cost = replace(self.shape, tp_size=tp_size, tiles=tiles).cost()
        scale = self.parameters / self._own_cost.parameters
        if scale == 1:
            return cost
        scaled = {unit: _scaled(unit, scale) for unit in set(cost.units)}
        units = [scaled[unit] for unit in cost.units]
        if tp_size == 1:
            rest = self.parameters - sum(unit.parameters for unit in units[:-1])
            units[-1] = replace(units[-1], parameters=max(rest, 0))
        groups = {group: _group_scaled(group, scale) for group in set(cost.groups)}
        return replace(cost, units=tuple(units), groups=tuple(groups[group] for group in cost.groups))


def _group_scaled(group: TensorGroup, scale: float) -> TensorGroup:
    matrices = tuple(int(matrix * scale) for matrix in group.matrices)
    return replace(group, matrices=matrices, vectors=int(group.vectors * scale))


def _scaled(unit: UnitCost, scale: float) -> UnitCost:
    return replace(unit, parameters=int(unit.parameters * scale), forward_flops=unit.forward_flops * scale)
