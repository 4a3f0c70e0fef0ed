"""1-bit LAMB: an exchange of scaled momenta and updates with adapted trust ratios."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch

from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.optim.one_bit_steppers import OneBitLambStepper, square_average
from zero_ext.zero.step.one_bit.exchange_base import OneBitContext
from zero_ext.zero.step.one_bit.stage0_exchange import ReplicatedExchange
from zero_ext.zero.step.update_schedule import Ownership


class LambExchange(ReplicatedExchange):
    """Li et al., "1-bit LAMB" (arXiv 2104.06069), algorithm 1. ``fresh_variance`` is computed from the
    gradients that the momenta before and after an exchange imply. A single rank exchanges nothing."""

    OWNERSHIP: ClassVar[Mapping[str, Ownership]] = {
        "lamb_error": Ownership.OWN,
        "lamb_server_error": Ownership.SHARD,
        "fresh_variance": Ownership.SHARED,
    }
    ERRORS: ClassVar[tuple[str, str]] = ("lamb_error", "lamb_server_error")
    SINGLE_RANK: ClassVar[bool] = True

    def __init__(self, context: OneBitContext) -> None:
        super().__init__(context)
        if not isinstance(context.stepper, OneBitLambStepper):
            raise zero_ext_bug("1-bit LAMB's exchange with another optimizer")
        self._lamb = context.stepper
        self._before: dict[int, torch.Tensor] = {}
        for number, fresh in enumerate(self._state["fresh_variance"]):
            fresh.copy_(self._lamb.state(number, "exp_avg_sq"))

    def step(self, scale: float, used: frozenset[str], exchanges: bool) -> None:
        """See :class:`ExchangeStrategy`."""
        self._lamb.make_scalings()

        def local_average(number: int) -> torch.Tensor:
            momentum = self._lamb.state(number, "exp_avg")
            self._before[number] = momentum.clone()
            gradient = self._gradient(number)
            for name, run in self._lamb.each(number, used):
                self._lamb.average(momentum, gradient, scale, [run])
                momentum[run.begin : run.end].mul_(self._lamb.scalings[name])
            return momentum

        self._average(used, "the momentum", self._updating(), local_average, 1.0)

    def _gradient(self, number: int) -> torch.Tensor:
        gradients = self._context.gradients[number]
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

    def _average_buffer(self, number: int) -> torch.Tensor:
        return self._lamb.state(number, "exp_avg")

    def _averaged(self, number: int, average: torch.Tensor, used: frozenset[str]) -> None:
        before, fresh = self._before.pop(number), self._state["fresh_variance"][number]
        for name, run in self._lamb.each(number, used):
            extent = slice(run.begin, run.end)
            momentum = average[extent].div_(self._lamb.scalings[name])
            implied = (momentum - before[extent].mul_(run.beta1)).div_(1 - run.beta1)
            square_average(fresh[extent], implied, 1.0, run._replace(begin=0, end=implied.numel()))
            directions = self._lamb.direction(number, run)
            ratio = self._lamb.adapted_ratio(number, name, run, fresh[extent], directions)
            self._lamb.descend_along(number, run, directions[0], ratio)
        self._context.masters[number].write_params()
