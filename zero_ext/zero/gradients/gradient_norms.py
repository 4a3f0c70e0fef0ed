"""Global gradient norms: exact sums of squares, independent of shards, buckets and order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from zero_ext import ops
from zero_ext.comm import Collectives
from zero_ext.config.tiers import is_stored
from zero_ext.offload import Device
from zero_ext.zero.gradients.accumulator import UnitGradients
from zero_ext.zero.gradients.gradient_storage import GradientGeneration, Squares
from zero_ext.zero.units.collective_errors import raise_on_all_ranks
from zero_ext.zero.units.rank_groups import largest_over_model, sum_over_model

Result = TypeVar("Result")


class OwnSquares(NamedTuple):
    """The squares of what this rank holds.

    ``limbs`` int64 [:data:`zero_ext.ops.ACCUMULATOR_ENTRIES`] are their sum. ``non_finite`` int64 [n] counts,
    for each of ``keys`` (unit and number of a parameter), the elements that are not finite. It is None where
    the gradients themselves will still be there for the error's text.
    """

    limbs: torch.Tensor
    keys: list[tuple[int, int]]
    non_finite: torch.Tensor | None


class GradientNorms:
    """Norms of the reduced gradients over all ranks; each rank adds the squares of its own shard.

    The sum is an integer superaccumulator, so its value does not depend on where shards or buckets end, nor
    on how the model is spread over ranks; parameters ``uncounted`` are counted by another one of these.
    Gradients in an accelerator's memory are added up there, by its own collectives, and nobody waits for it.
    Every method is a collective unless its result is known for the ``generation`` of the gradients.
    """

    def __init__(
        self,
        gradients: Sequence[UnitGradients],
        collectives: Collectives,
        device: Device,
        generation: GradientGeneration,
        uncounted: Collection[nn.Parameter] = (),
    ) -> None:
        self._gradients = tuple(gradients)
        self._collectives, self._device = collectives, device
        self._uncounted = frozenset(uncounted)
        self._generation = generation
        self._computed_at = generation.of_values  # the results below
        self._total: torch.Tensor | None = None
        self._each: dict[tuple[int, int], torch.Tensor] | None = None
        self._largest: dict[tuple[int, int], torch.Tensor] | None = None

    @property
    def on_device(self) -> bool:
        """Return whether all gradients are in an accelerator's memory."""
        tiers = {gradients.storage.tier for gradients in self._gradients}
        return self._device.is_accelerator and tiers <= {"device"}

    def _drop_outdated(self) -> None:
        if self._computed_at != self._generation.of_values:
            self._computed_at = self._generation.of_values
            self._total = self._each = self._largest = None

    def total(self) -> torch.Tensor:
        """Return the 2-norm over all gradients, 0-d float64; NaN if an element is not finite."""
        self._drop_outdated()
        if self._total is None:
            limbs = self._collectives.shards.sum_(self.own().limbs, "global gradient norm")
            if self._collectives.model is not None:
                limbs = limbs.cpu()
            sum_over_model(self._collectives.model, limbs, "gradient norm of the whole model")
            self._total = ops.squared_norm_value(limbs).sqrt()
        return self._total

    def own(self) -> OwnSquares:
        """Return this rank's part of the 2-norm; a collective where gradients are on NVMe."""
        if self.on_device:
            keys = [key for key in self._keys() if self._parameter(*key) not in self._uncounted]
            # One row per parameter, because an error is raised after the gradients are
            # gone and takes its names from the counts in these rows.
            table = self._table_of(keys)
            return OwnSquares(table.sum(0), keys, table[:, -1])
        return OwnSquares(self.read_on_all_ranks(lambda: self._own_squares().total()), [], None)

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

    def of(self, gradients: UnitGradients, index: int) -> torch.Tensor:
        """Return the 2-norm of one parameter's gradient, 0-d float64 where the model trains; of an expert's,
        with those in its place elsewhere."""
        self._drop_outdated()
        if self._each is None:
            keys = self._keys()
            table = self.read_on_all_ranks(lambda: self._table_of(keys))
            self._collectives.shards.sum_(table, "gradient norms of the parameters")
            values = [ops.squared_norm_value(row) for row in table]
            self._each = self._by_key(keys, torch.stack(values).sqrt() if values else table.double())
        return self._each[self._gradients.index(gradients), index]

    def _table_of(self, keys: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return the limbs of the squares that this rank holds of each of ``keys``."""
        on_device = self.on_device
        device = self._device.device if on_device else torch.device("cpu")
        table = torch.zeros(len(keys), ops.ACCUMULATOR_ENTRIES, dtype=torch.int64, device=device)
        rows = [Squares(row) if on_device else Squares() for row in table]
        for squares, (unit, number) in zip(rows, keys, strict=True):
            self._gradients[unit].add_squared_norm(squares, number)
        if not on_device:  # all are added up on their devices before the host waits for the first
            for row, squares in zip(table, rows, strict=True):
                row += squares.total()
        return table

    def largest(self, gradients: UnitGradients, index: int) -> torch.Tensor:
        """Return the inf-norm of one parameter's gradient, as :meth:`of` gives the 2-norm."""
        self._drop_outdated()
        if self._largest is None:
            keys = self._keys()
            own = self.read_on_all_ranks(lambda: self._own_largest(keys))
            table = own.new_zeros(self._collectives.world_size, len(keys))
            table[self._collectives.rank] = own
            self._collectives.sum_(table, "largest gradients of the parameters")
            self._largest = self._by_key(keys, table.amax(0))
        return self._largest[self._gradients.index(gradients), index]

    def _own_largest(self, keys: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return the largest magnitude of this rank's elements of each of ``keys``, float64 [n]."""
        device = self._device.device if self.on_device else torch.device("cpu")
        largest = torch.zeros(len(keys), dtype=torch.float64, device=device)
        for own, (unit, number) in zip(largest, keys, strict=True):
            for values in self._gradients[unit].visit_parameter(number):
                if values.numel():
                    norm = torch.linalg.vector_norm(values, float("inf"))
                    torch.maximum(own, norm.to(device).double(), out=own)
        return largest

    def largest_of_all(self) -> float:
        """Return the inf-norm over all gradients; wait for the device."""
        own = [self.largest(self._gradients[unit], number) for unit, number in self._keys()]
        largest = float(torch.stack(own).amax()) if own else 0.0
        return largest_over_model(self._collectives.model, largest, "largest gradient of the whole model")

    def _by_key(
        self, keys: Sequence[tuple[int, int]], values: torch.Tensor
    ) -> dict[tuple[int, int], torch.Tensor]:
        """Return each of ``values`` [n], where the model trains."""
        if values.device.type == "cpu":
            (values,) = self._device.to_tier("device", values)
        return dict(zip(keys, values.unbind(0), strict=True))

    def read_on_all_ranks(self, read: Callable[[], Result]) -> Result:
        """Return the result of ``read``, once all ranks have theirs where gradients are on NVMe."""
        stored = is_stored(*(gradients.storage.tier for gradients in self._gradients))
        return raise_on_all_ranks(self._collectives, read, "reading gradients from NVMe", stored=stored)

    def _parameter(self, unit: int, number: int) -> nn.Parameter:
        return self._gradients[unit].unit.parameters[number]

    def _keys(self) -> list[tuple[int, int]]:
        """Return the unit and number of the parameters that have a gradient, alike on all ranks."""
        return [
            (unit, number)
            for unit, gradients in enumerate(self._gradients)
            # Sorted: all ranks add up tables of these rows, and a set promises no order.
            for number in sorted(gradients.contributed)
        ]
