"""Parameters that several ranks of one model have: their gradients are added up before a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zero_ext.comm import Collectives
from zero_ext.zero.construction.rank_consistency import bytes_of_all_ranks
from zero_ext.zero.gradients.accumulator import UnitGradients
from zero_ext.zero.gradients.gradient_storage import GradientGeneration
from zero_ext.zero.units.parameter_marks import tie_of


class _Tied(NamedTuple):
    """A tie of ``ranks`` with gradients that are ``on_device``."""

    name: str
    ranks: tuple[int, ...]
    on_device: bool


class TiedGradients:
    """The gradients of tied parameters, each the sum of what its ranks have, in rank order and float32.

    A tied parameter is in a unit of its own, so that ranks with the same place in their data-parallel groups
    hold the same elements of it. Ranks without a tied parameter take part in sums on a device, which the
    backend asks of all ranks of its connections. Making one of these is a collective of ``model``.
    """

    def __init__(
        self, gradients: Sequence[UnitGradients], model: Collectives | None, generation: GradientGeneration
    ) -> None:
        self._own: dict[_Tied, tuple[UnitGradients, int]] = {}
        self._ties: list[_Tied] = []
        self._generation = generation
        self._summed_at = -1  # the number of arrived gradients at the last sum, which counts as a write
        if model is None:
            return
        self._model = model
        for each in gradients:
            for number, parameter in enumerate(each.unit.parameters):
                found = tie_of(parameter)
                if found is not None:
                    on_device = each.unit.flat.device.type != "cpu" and each.storage.tier == "device"
                    self._own[_Tied(found.name, found.ranks, on_device)] = each, number
        self._device = gradients[0].unit.flat.device if gradients else torch.device("cpu")
        everyones = _of_all_ranks(model, list(self._own))
        # Each sum is a collective, so all ranks need one order, which a set does not have.
        self._ties = sorted(each for each in everyones if each.on_device or each in self._own)

    def sum_(self) -> None:
        """Add them up, once for all gradients there are; a collective of the ranks with the model's parts.
        Raises ``RuntimeError`` for a tied parameter that got no gradient here."""
        if self._summed_at == self._generation.received:
            return
        self._summed_at = self._generation.received
        for tied in self._ties:
            self._sum(tied)

    def _sum(self, tied: _Tied) -> None:
        label = f"gradient of tied parameter '{tied.name}'"
        added = 0

        def add_up(values: torch.Tensor) -> None:
            nonlocal added
            added += 1
            if tied.on_device:
                self._model.sum_among_(tied.ranks, values, label)
            else:
                self._model.among(tied.ranks).sum_(values, label)

        if tied in self._own:
            gradients, number = self._own[tied]
            if number not in gradients.contributed:
                raise RuntimeError(
                    f"tied parameter '{tied.name}': expected a gradient in every stage that has it, got "
                    "none in this one. Use it in every such stage, or leave it out of the tie."
                )
            gradients.change_parameter(number, add_up)
        # Also a rank that has the parameter adds nothing if its shard has no element of it.
        if tied.on_device and not added:
            add_up(torch.empty(0, device=self._device))


def _of_all_ranks(model: Collectives, own: Sequence[_Tied]) -> set[_Tied]:
    """Return the ties that any rank of ``model`` has."""
    rows = bytes_of_all_ranks(model, json.dumps(own).encode(), "agreement on tied parameters")
    return {_Tied(name, tuple(tied), far) for row in rows if row for name, tied, far in json.loads(row)}
