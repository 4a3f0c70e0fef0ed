"""Adam without bias correction on flat ranges, and the slices of its steps with a frozen variance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from zero_ext import ops
from zero_ext.offload import MASTER, StepStaging
from zero_ext.optim.one_bit.onebit_optimizer import OneBitOptimizer
from zero_ext.optim.steppers.fused import AdamStepper
from zero_ext.optim.steppers.stepper import OwnedRange, Segment

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

    def __init__(
        self,
        optimizer: OneBitOptimizer,
        groups: list[dict[str, Any]],
        ranges: Sequence[OwnedRange],
        staging: StepStaging,
    ) -> None:
        super().__init__(groups, ranges, torch.float32, staging)
        self.optimizer = optimizer
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
