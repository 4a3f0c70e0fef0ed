"""The way of 1-bit LAMB: momenta of one magnitude are exchanged, and parameters step by adapted ratios."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch

from zero_ext.optim.one_bit.onebit_lamb_stepper import OneBitLambStepper, square_average
from zero_ext.zero.step.auxiliary_state import Room
from zero_ext.zero.step.one_bit.exchange_base import Parts
from zero_ext.zero.step.one_bit.stage0_exchange import ReplicatedWay


class LambSigns(ReplicatedWay):
    """Li et al., "1-bit LAMB" (arXiv 2104.06069), algorithm 1. ``fresh_variance`` is made of gradients as the
    momenta before and after an exchange tell them; a single rank exchanges nothing."""

    ROOMS: ClassVar[Mapping[str, Room]] = {
        "lamb_error": Room.OWN,
        "lamb_server_error": Room.SHARD,
        "fresh_variance": Room.SHARED,
    }
    ERRORS: ClassVar[tuple[str, str]] = ("lamb_error", "lamb_server_error")
    ALONE: ClassVar[bool] = True

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        if not isinstance(parts.stepper, OneBitLambStepper):
            raise AssertionError("1-bit LAMB's exchange with another optimizer")
        self._lamb = parts.stepper
        self._before: dict[int, torch.Tensor] = {}
        for number, fresh in enumerate(self._kept["fresh_variance"]):
            fresh.copy_(self._lamb.state(number, "exp_avg_sq"))

    def step(self, scale: float, used: frozenset[str], exchanges: bool) -> None:
        """See :class:`Way`."""
        self._lamb.make_scalings()

        def averaged_here(number: int) -> torch.Tensor:
            momentum = self._lamb.state(number, "exp_avg")
            self._before[number] = momentum.clone()
            gradient = self._gradient(number)
            for name, run in self._lamb.each(number, used):
                self._lamb.average(momentum, gradient, scale, [run])
                momentum[run.begin : run.end].mul_(self._lamb.scalings[name])
            return momentum

        self._average(used, "the momentum", self._updating(), averaged_here, 1.0)

    def _gradient(self, number: int) -> torch.Tensor:
        gradients = self._parts.gradients[number]
        if self._ranks > 1:
            return gradients.local_sum()
        alone = gradients.for_optimizer()
        return alone.read(0, alone.numel)

    def _average(
        self,
        used: frozenset[str],
        what: str,
        numbers: Sequence[int],
        values: Callable[[int], torch.Tensor],
        factor: float,
    ) -> None:
        if self._ranks > 1:
            super()._average(used, what, numbers, values, factor)
            return
        for number in numbers:
            self._averaged(number, values(number), used)

    def _room(self, number: int) -> torch.Tensor:
        return self._lamb.state(number, "exp_avg")

    def _averaged(self, number: int, average: torch.Tensor, used: frozenset[str]) -> None:
        before, fresh = self._before.pop(number), self._kept["fresh_variance"][number]
        for name, run in self._lamb.each(number, used):
            part = slice(run.begin, run.end)
            momentum = average[part].div_(self._lamb.scalings[name])
            told = (momentum - before[part].mul_(run.beta1)).div_(1 - run.beta1)
            square_average(fresh[part], told, 1.0, run._replace(begin=0, end=told.numel()))
            directions = self._lamb.direction(number, run)
            ratio = self._lamb.adapted_ratio(number, name, run, fresh[part], directions)
            self._lamb.descend_along(number, run, directions[0], ratio)
        self._parts.masters[number].write_output()
