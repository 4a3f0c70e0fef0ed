"""Adam and LAMB without bias correction on flat ranges, and their steps with a frozen variance in slices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from zero_ext import ops
from zero_ext.offload import MASTER, put
from zero_ext.optim.fused import AdamStepper
from zero_ext.optim.one_bit import OneBitLamb, OneBitOptimizer
from zero_ext.optim.stepper import Segment, StepperInputs, Update

# The fused op corrects the bias by 1 - beta**step, which is 1 here for every beta below 1.
_NO_BIAS = 2.0**1000
# Several operations pass over a chunk while it is in the cache.
_CACHE_CHUNK_ELEMENTS = 1 << 18


class HyperparameterRange(NamedTuple):
    """Elements [begin, end) of a range that the same hyper-parameters hold for. ``rate`` is the sum of the
    learning rates of local steps."""

    begin: int
    end: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    rate: float

    def chunks(self) -> Iterator[slice]:
        """Yield the range in chunks that fit the cache."""
        for begin in range(self.begin, self.end, _CACHE_CHUNK_ELEMENTS):
            yield slice(begin, min(begin + _CACHE_CHUNK_ELEMENTS, self.end))


class OneBitStepper(AdamStepper):
    """Steps of a :class:`OneBitOptimizer`. :meth:`step` is Adam's without bias correction; with a frozen
    variance the engine exchanges what it needs between :meth:`average` and :meth:`descend`.

    ``names`` are the parameters', ``rates`` the sums of their learning rates since the ranks last met, in
    0/1 Adam's local steps.
    """

    reads_scale_on_device = False

    def __init__(self, inputs: StepperInputs) -> None:
        super().__init__(inputs)
        self.optimizer: OneBitOptimizer = inputs.optimizer
        self.names = frozenset(self._steps)
        self.rates: dict[str, float] = {}

    def state(self, index: int, kind: str) -> torch.Tensor:
        """Return the live state of one kind, float32 [n]; the masters' kind is "master"."""
        owned = self._ranges[index].state
        return owned.read(kind, 0, owned.numel)

    def hyper_ranges(self, index: int, used: frozenset[str]) -> list[HyperparameterRange]:
        """Return the elements of the parameters named in ``used``."""
        found: list[HyperparameterRange] = []
        for segment in self._ranges[index].segments:
            if segment.name not in used or not segment.numel:
                continue
            group = self._groups[segment.group]
            rate = self.rates.get(segment.name, 0.0)
            numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], rate)
            hyper = tuple(float(number) for number in numbers)
            if found and found[-1].end == segment.begin and found[-1][2:] == hyper:
                found[-1] = found[-1]._replace(end=segment.end)
            else:
                found.append(HyperparameterRange(segment.begin, segment.end, *hyper))
        return found

    def count(self, used: frozenset[str]) -> None:
        """Note a step of the parameters named in ``used`` by other means than :meth:`step`."""
        for name in used & self._steps.keys():
            self._steps[name] += 1

    def add_rates(self, used: frozenset[str]) -> None:
        """Note a local step of the parameters named in ``used``."""
        for segment in {each.name: each for owned in self._ranges for each in owned.segments}.values():
            if segment.name in used:
                lr = float(self._groups[segment.group]["lr"])
                self.rates[segment.name] = self.rates.get(segment.name, 0.0) + lr

    def raise_variance(self, index: int, payload: int) -> None:
        """Raise the updated variance before signs follow, in payloads of ``payload`` elements of
        the range. No element's root stays below the optimizer's ``variance_floor`` x the root mean square of
        the momentum in its block, all with one scale."""
        momentum, variance = self.state(index, "exp_avg"), self.state(index, "exp_avg_sq")
        floor = self.optimizer.variance_floor
        for elements, raised in zip(momentum.split(payload), variance.split(payload), strict=True):
            for block, floored in zip(
                elements.split(ops.SIGN_BLOCK), raised.split(ops.SIGN_BLOCK), strict=True
            ):
                floored.clamp_(min=(floor * norm(block)) ** 2 / block.numel())

    def average(
        self,
        momentum: torch.Tensor,
        gradient: torch.Tensor,
        scale: float,
        runs: Sequence[HyperparameterRange],
    ) -> None:
        """``momentum`` [n] becomes beta1 x momentum + (1 - beta1) x scale x ``gradient`` [n] (any float
        dtype)."""
        for run in runs:
            for chunk in run.chunks():
                brought = (gradient[chunk].float() * scale).mul_(1 - run.beta1)
                momentum[chunk].mul_(run.beta1).add_(brought)

    def descend(self, index: int, runs: Sequence[HyperparameterRange]) -> None:
        """Decay the masters and step along the momentum over the root of the frozen variance."""
        master, exp_avg = self.state(index, MASTER), self.state(index, "exp_avg")
        variance = self.state(index, "exp_avg_sq")
        for run in runs:
            for chunk in run.chunks():
                update = exp_avg[chunk] / denominator(variance[chunk], run.eps)
                decay_(master[chunk], run)
                self.check_finite(master[chunk].sub_(update.mul_(run.lr)))

    def check_finite(self, values: torch.Tensor) -> None:
        """Raise the flag of :meth:`watch` if ``values`` [n], which were just written, are not all finite."""
        if self._flag is not None:
            self._flag.check(values)

    def scalars(self) -> dict[str, Any]:
        """See :class:`Stepper`."""
        return {**super().scalars(), "rates": dict(self.rates)}

    def load_scalars(self, state: dict[str, Any]) -> None:
        """See :class:`Stepper`; Adam's do."""
        super().load_scalars(state)
        self.rates = dict(state.get("rates", {}))

    def _hyper_parameters(self, segment: Segment) -> list[float]:
        group = self._groups[segment.group]
        beta1, beta2 = group["betas"]
        numbers = (group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
        decoupled, maximize = 1.0, 0.0
        return [*map(float, numbers), _NO_BIAS, decoupled, maximize]


def norm(values: torch.Tensor) -> float:
    """Return the 2-norm, of an exact sum: alike on all ranks and devices."""
    accumulator = torch.zeros(ops.ACCUMULATOR_ENTRIES, dtype=torch.int64, device=values.device)
    ops.squared_norm_(values, accumulator)
    return float(ops.squared_norm_value(accumulator.cpu()).sqrt())


def denominator(variance: torch.Tensor, eps: float) -> torch.Tensor:
    """Return what Adam divides the momentum by, a new tensor."""
    return variance.sqrt().add_(eps)


def decay_(master: torch.Tensor, run: HyperparameterRange) -> None:
    """Decoupled weight decay of one step."""
    if run.weight_decay:
        master.mul_(1 - run.lr * run.weight_decay)


class OneBitLambStepper(OneBitStepper):
    """Steps of :class:`OneBitLamb`. By parameter: ``ratios`` are the averages of trust ratios, ``factors``
    what they were multiplied by last, ``scalings`` what brings momenta to one magnitude."""

    def __init__(self, inputs: StepperInputs) -> None:
        super().__init__(inputs)
        self._lamb: OneBitLamb = inputs.optimizer
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
