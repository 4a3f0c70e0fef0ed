"""0/1 Adam once its variance is frozen: local steps between exchanges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from zero_ext.optim.one_bit_steppers import decay_, denominator
from zero_ext.zero.step.one_bit.exchange_base import OneBitContext
from zero_ext.zero.step.one_bit.stage0_exchange import ReplicatedExchange
from zero_ext.zero.step.update_schedule import Ownership


class ZeroOneExchange(ReplicatedExchange):
    """Each rank steps by a momentum of its own. ``drift`` is the sum of learning rate x momentum since the
    ranks last met; their parameters are the masters, which stay the same on all ranks, less drift over the
    root of the variance. When they meet, the average of the drifts, by its signs, moves the masters, and
    divided by the sum of the learning rates it is everybody's momentum.

    Weight decay acts on the masters. Source: Lu et al., "0/1 Adam" (arXiv 2202.06009), algorithm 1.
    """

    OWNERSHIP: ClassVar[Mapping[str, Ownership]] = {
        "drift": Ownership.OWN,
        "drift_error": Ownership.OWN,
        "drift_server_error": Ownership.SHARD,
        "momentum": Ownership.OWN,
    }
    ERRORS: ClassVar[tuple[str, str]] = ("drift_error", "drift_server_error")

    def __init__(self, context: OneBitContext) -> None:
        super().__init__(context)
        for number, momentum in enumerate(self._state["momentum"]):
            momentum.copy_(self._stepper.state(number, "exp_avg"))

    def step(self, scale: float, used: frozenset[str], exchanges: bool) -> None:
        """See :class:`ExchangeStrategy`."""
        self._stepper.add_rates(used)
        for number in self._updating():
            momentum, drift = self._state["momentum"][number], self._state["drift"][number]
            local, runs = (
                self._context.gradients[number].local_sum(),
                self._stepper.hyper_ranges(number, used),
            )
            self._stepper.average(momentum, local, scale, runs)
            master = self._stepper.state(number, "master")
            for run in runs:
                for chunk in run.chunks():
                    drift[chunk].add_(momentum[chunk] * run.lr)
                    decay_(master[chunk], run)
                    self._stepper.check_finite(master[chunk])
            if not exchanges:
                self._write(number)
        if exchanges:
            # Not ``used``: parameters without a gradient in this step may have drifted in earlier ones.
            drifted = frozenset(self._stepper.rates)
            self._average(drifted, "the drift", self._drifted(drifted), self._state["drift"].__getitem__, 1.0)
            self._stepper.rates.clear()

    def _drifted(self, names: frozenset[str]) -> list[int]:
        return [
            number
            for number in range(len(self._context.masters))
            if not names.isdisjoint(spec.name for spec in self._layout(number).specs)
        ]

    def _averaged(self, number: int, average: torch.Tensor, used: frozenset[str]) -> None:
        master, common = (self._stepper.state(number, kind) for kind in ("master", "exp_avg"))
        variance = self._stepper.state(number, "exp_avg_sq")
        for run in self._stepper.hyper_ranges(number, used):
            for chunk in run.chunks():
                update = average[chunk] / denominator(variance[chunk], run.eps)
                self._stepper.check_finite(master[chunk].sub_(update))
                common[chunk].copy_(average[chunk] / run.rate)
            own_range = slice(run.begin, run.end)
            self._state["momentum"][number][own_range].copy_(common[own_range])
        self._state["drift"][number].zero_()
        self._context.masters[number].write_params()

    def restore(self) -> None:
        """See :class:`ExchangeStrategy`."""
        for number in range(len(self._context.masters)):
            self._write(number)

    def _write(self, number: int) -> None:
        master, flat = self._stepper.state(number, "master"), self._context.masters[number].unit.flat
        drift, variance = self._state["drift"][number], self._stepper.state(number, "exp_avg_sq")
        flat.copy_(master)
        for run in self._stepper.hyper_ranges(number, frozenset(self._stepper.rates)):
            for chunk in run.chunks():
                apart = drift[chunk] / denominator(variance[chunk], run.eps)
                flat[chunk].copy_(master[chunk] - apart)
