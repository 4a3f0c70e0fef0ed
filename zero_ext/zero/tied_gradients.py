"""Parameters that several ranks of one model have: their gradients are added up before a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_ext.comm import Collectives
from zero_ext.zero.gradients import UnitGradients
from zero_ext.zero.tie import Tie, tie_of


class TiedGradients:
    """The gradients of tied parameters, each the sum of what its ranks have.

    A tied parameter is in a unit of its own, so that ranks with the same place in their data-parallel groups
    hold the same elements of it.
    """

    def __init__(self, gradients: Sequence[UnitGradients], model: Collectives | None) -> None:
        self._places: list[tuple[Tie, Collectives, UnitGradients, int]] = []
        self._summed = False
        for each in gradients:
            for number, parameter in enumerate(each.unit.parameters):
                found = tie_of(parameter)
                if found is not None and model is not None:
                    self._places.append((found, model.among(found.ranks), each, number))
        self._places.sort(key=lambda place: place[0].name)

    def forget(self) -> None:
        """New gradients came."""
        self._summed = False

    def sum_(self) -> None:
        """Adds them up, once for all gradients there are; a collective of the ranks of each tie.

        Raises ``RuntimeError`` for a tied parameter that got no gradient here.
        """
        if self._summed or not self._places:
            return
        self._summed = True
        for found, ranks, gradients, number in self._places:
            if number not in gradients.contributed:
                raise RuntimeError(
                    f"tied parameter '{found.name}' got no gradient in this stage, and may have one "
                    "elsewhere: use it in every stage that has it, or leave it out of the tie"
                )

            def add_up(part: torch.Tensor, tie: Tie = found, ranks: Collectives = ranks) -> None:
                ranks.sum_(part, f"gradient of tied parameter '{tie.name}'")

            gradients.change_parameter(number, add_up)
