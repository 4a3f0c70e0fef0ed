"""1-bit LAMB on flat ranges that hold whole parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zero_ext.offload import MASTER, StepStaging, put
from zero_ext.optim.one_bit.onebit_lamb import OneBitLamb
from zero_ext.optim.one_bit.onebit_stepper import HyperparameterRange, OneBitStepper, denominator, norm
from zero_ext.optim.steppers.stepper import OwnedRange, Update


class OneBitLambStepper(OneBitStepper):
    """Steps of :class:`OneBitLamb`. By parameter: ``ratios`` are the averages of trust ratios, ``factors``
    what they were multiplied by last, ``scalings`` what brings momenta to one magnitude."""

    def __init__(
        self,
        optimizer: OneBitLamb,
        groups: list[dict[str, Any]],
        ranges: Sequence[OwnedRange],
        staging: StepStaging,
    ) -> None:
        super().__init__(optimizer, groups, ranges, staging)
        self._lamb = optimizer
        self.ratios: dict[str, float] = {}
        self.factors: dict[str, float] = {}
        self.scalings: dict[str, float] = {}

    def step(self, updates: Sequence[Update], scale: torch.Tensor, used: frozenset[str]) -> Iterator[int]:
        """See :class:`Stepper`: the warm-up's."""
        self.count(used)
        for update in updates:
            gradient = update.gradient.read(0, update.gradient.numel)
            moments = [self.state(update.index, kind) for kind in ("exp_avg", "exp_avg_sq")]
            for name, run in self.each(update.index, used):
                self.average(moments[0], gradient, float(scale), [run])
                square_average(moments[1], gradient, float(scale), run)
                direction, _ = self.direction(update.index, run)
                ratio = self.trust_ratio(update.index, run, direction)
                if ratio != 1:
                    self._average_ratio(name, ratio)
                self.descend_along(update.index, run, direction, ratio)
            yield self.write(update.index)

    def raise_variance(self, index: int, payload: int) -> None:
        """See :class:`OneBitStepper`; parameters are scaled to one magnitude before signs are taken, so each
        has a floor of its own."""
        for _, run in self.each(index, self.names):
            elements = slice(run.begin, run.end)
            momentum, variance = (self.state(index, kind)[elements] for kind in ("exp_avg", "exp_avg_sq"))
            variance.clamp_(min=(self.optimizer.variance_floor * norm(momentum)) ** 2 / momentum.numel())

    def each(self, index: int, used: frozenset[str]) -> Iterator[tuple[str, HyperparameterRange]]:
        """Yield the parameters named in ``used``, one at a time."""
        for segment in self._ranges[index].segments:
            for run in self.hyper_ranges(index, used & {segment.name}):
                yield segment.name, run

    def direction(self, index: int, run: HyperparameterRange) -> tuple[torch.Tensor, torch.Tensor]:
        """Adam's update of one parameter with its weight decay, and without."""
        elements = slice(run.begin, run.end)
        momentum, variance = (self.state(index, kind)[elements] for kind in ("exp_avg", "exp_avg_sq"))
        alone = momentum / denominator(variance, run.eps)
        if not run.weight_decay:
            return alone, alone
        return alone + self.state(index, MASTER)[elements] * run.weight_decay, alone

    def trust_ratio(self, index: int, run: HyperparameterRange, direction: torch.Tensor) -> float:
        """Return the norm of the weights over that of ``direction``, clamped; 1 if either is 0."""
        weights, update = norm(self.state(index, MASTER)[run.begin : run.end]), norm(direction)
        low, high = self._lamb.coefficients
        return min(max(weights / update, low), high) if weights and update else 1.0

    def descend_along(
        self, index: int, run: HyperparameterRange, direction: torch.Tensor, ratio: float
    ) -> None:
        """Step the masters of one parameter by lr x ``ratio`` against ``direction``, which is used up."""
        self.check_finite(self.state(index, MASTER)[run.begin : run.end].sub_(direction.mul_(run.lr * ratio)))

    def adapted_ratio(
        self,
        index: int,
        name: str,
        run: HyperparameterRange,
        fresh: torch.Tensor,
        directions: tuple[torch.Tensor, ...],
    ) -> float:
        """Return the trust ratio with a frozen variance: the warm-up's times a factor that the ``fresh``
        variance of the parameter makes.
        """
        if name not in self.ratios:  # no warm-up of this optimizer's
            self._average_ratio(
                name, self.trust_ratio(index, run, directions[0]) / (1 - self._lamb.coeff_beta)
            )
        variance = self.state(index, "exp_avg_sq")[run.begin : run.end]
        factor = float((denominator(variance, run.eps) / denominator(fresh, run.eps)).max())
        decayed = norm(directions[0])
        if run.weight_decay and decayed:
            share = min(1.0, norm(directions[1]) / decayed)
            factor = factor * share + (1 - share)
        low, high = self._lamb.factors
        last, change = self.factors.get(name, 1.0), self._lamb.factor_threshold
        factor = min(max(factor, low), high)
        factor = min(max(factor, last * (1 - change)), last * (1 + change))
        self.factors[name] = factor
        return self.ratios[name] * factor

    def make_scalings(self) -> None:
        """Once, with the momenta of the warm-up's end: each parameter's root mean square is brought to the
        mean of all of them. A momentum of zero stays as it is."""
        if self.scalings:
            return
        sizes: dict[str, float] = {}
        for index in range(len(self._ranges)):
            for name, run in self.each(index, self.names):
                momentum = self.state(index, "exp_avg")[run.begin : run.end]
                sizes[name] = norm(momentum) / math.sqrt(momentum.numel())
        united = sum(sizes.values()) / len(sizes)
        self.scalings = {name: united / size if size else 1.0 for name, size in sizes.items()}

    def write(self, index: int) -> int:
        """Let the parameters follow the masters; return ``index``."""
        owned = self._ranges[index]
        if owned.output is not None:
            put(owned.output, 0, self.state(index, MASTER), "device")
        return index

    def scalars(self) -> dict[str, Any]:
        """See :class:`Stepper`."""
        own = {"ratios": self.ratios, "factors": self.factors, "scalings": self.scalings}
        return {**super().scalars(), **{name: dict(values) for name, values in own.items()}}

    def load_scalars(self, state: dict[str, Any]) -> None:
        """See :class:`Stepper`; LAMB's do."""
        super().load_scalars(state)
        self.ratios, self.factors, self.scalings = (
            dict(state.get(name, {})) for name in ("ratios", "factors", "scalings")
        )

    def _average_ratio(self, name: str, ratio: float) -> None:
        beta = self._lamb.coeff_beta
        self.ratios[name] = beta * self.ratios.get(name, 0.0) + (1 - beta) * ratio


def square_average(
    variance: torch.Tensor, gradient: torch.Tensor, scale: float, run: HyperparameterRange
) -> None:
    """``variance`` [n] becomes beta2 x variance + (1 - beta2) x the square of scale x ``gradient`` [n], in
    one run."""
    for chunk in run.chunks():
        brought = gradient[chunk].float() * scale
        variance[chunk].mul_(run.beta2).add_(brought.square_().mul_(1 - run.beta2))
