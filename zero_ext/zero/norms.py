"""Global gradient norms: exact sums of squares, independent of shards, buckets and order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import torch
from torch import nn

from zero_ext import ops
from zero_ext.comm import Collectives
from zero_ext.zero.gradients import UnitGradients
from zero_ext.zero.model_ranks import largest_over_model, sum_over_model
from zero_ext.zero.squares import Squares
from zero_ext.zero.together import together

Result = TypeVar("Result")


class GradientNorms:
    """Norms of the reduced gradients over all ranks; each rank adds the squares of its own shard.

    The sum is an integer superaccumulator, so its value does not depend on where shards or buckets end, nor
    on how the model is spread over ranks; parameters ``uncounted`` are counted by another one of these.
    Every method is a collective unless its result is known since the last :meth:`forget`.
    """

    def __init__(
        self,
        gradients: Sequence[UnitGradients],
        collectives: Collectives,
        uncounted: Collection[nn.Parameter] = (),
    ) -> None:
        self._gradients = tuple(gradients)
        self._collectives = collectives
        self._uncounted = frozenset(uncounted)
        self._total: torch.Tensor | None = None
        self._each: dict[tuple[int, int], float] | None = None
        self._largest: dict[tuple[int, int], float] | None = None

    def forget(self) -> None:
        """The gradients changed."""
        self._total = self._each = self._largest = None

    def total(self) -> torch.Tensor:
        """The 2-norm over all gradients, 0-d float64; NaN if an element is not finite."""
        if self._total is None:
            accumulator = self.read_together(lambda: self._own_squares().total())
            self._collectives.shards.sum_(accumulator, "global gradient norm")
            sum_over_model(self._collectives.model, accumulator, "gradient norm of the whole model")
            self._total = ops.squared_norm_value(accumulator).sqrt()
        return self._total

    def _own_squares(self) -> Squares:
        squares = Squares()
        for gradients in self._gradients:
            if self._uncounted.isdisjoint(gradients.unit.parameters):
                if gradients.contributed:
                    gradients.add_squared_norm(squares)
                continue
            for number in gradients.contributed:
                if gradients.unit.parameters[number] not in self._uncounted:
                    gradients.add_squared_norm(squares, number)
        return squares

    def of(self, gradients: UnitGradients, index: int) -> float:
        """The 2-norm of one parameter's gradient; of an expert's, with those in its place elsewhere."""
        if self._each is None:
            keys = self._keys()
            table = self.read_together(self._own_table)
            self._collectives.shards.sum_(table, "gradient norms of the parameters")
            values = (float(ops.squared_norm_value(row.contiguous()).sqrt()) for row in table)
            self._each = dict(zip(keys, values, strict=True))
        return self._each[self._gradients.index(gradients), index]

    def _own_table(self) -> torch.Tensor:
        rows = []
        for unit, number in self._keys():
            squares = Squares()
            self._gradients[unit].add_squared_norm(squares, number)
            rows.append(squares)
        table = torch.zeros(len(rows), ops.ACCUMULATOR_ENTRIES, dtype=torch.int64, device="cpu")
        for row, squares in zip(table, rows, strict=True):
            row += squares.total()
        return table

    def largest(self, gradients: UnitGradients, index: int) -> float:
        """The inf-norm of one parameter's gradient; of an expert's, with those in its place elsewhere."""
        if self._largest is None:
            keys = self._keys()
            world = self._collectives.world_size
            table = torch.zeros(world, len(keys), dtype=torch.float64, device="cpu")
            own = self.read_together(lambda: [self._gradients[unit].largest(number) for unit, number in keys])
            table[self._collectives.rank] = torch.tensor(own, dtype=torch.float64, device="cpu")
            self._collectives.sum_(table, "largest gradients of the parameters")
            self._largest = dict(zip(keys, table.amax(0).tolist(), strict=True))
        return self._largest[self._gradients.index(gradients), index]

    def largest_of_all(self) -> float:
        """The inf-norm over all gradients."""
        own = [
            self.largest(gradients, number)
            for gradients in self._gradients
            for number in gradients.contributed
        ]
        largest = float(torch.tensor([0.0, *own], dtype=torch.float64, device="cpu").amax())
        return largest_over_model(self._collectives.model, largest, "largest gradient of the whole model")

    def read_together(self, read: Callable[[], Result]) -> Result:
        """The result of ``read``; where gradients lie in storage, which may fail on one rank alone, once all
        ranks have theirs."""
        if any(gradients.home.tier == "nvme" for gradients in self._gradients):
            return together(self._collectives, read, "reading gradients from NVMe")
        return read()

    def _keys(self) -> list[tuple[int, int]]:
        return [
            (unit, number)
            for unit, gradients in enumerate(self._gradients)
            for number in range(len(gradients.unit.parameters))
        ]
