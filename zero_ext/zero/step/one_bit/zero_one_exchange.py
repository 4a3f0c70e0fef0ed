"""The way of 0/1 Adam once its variance is frozen: ranks drift apart and meet again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from zero_ext.optim.one_bit.onebit_stepper import decay_, denominator
from zero_ext.zero.step.auxiliary_state import Room
from zero_ext.zero.step.one_bit.exchange_base import Parts
from zero_ext.zero.step.one_bit.stage0_exchange import ReplicatedWay


class LocalSteps(ReplicatedWay):
    """Each rank steps by a momentum of its own. ``drift`` is the sum of learning rate x momentum since the
    ranks last met; their parameters are the masters, which stay the same on all ranks, less drift over the
    root of the variance. When they meet, the average of the drifts, by its signs, moves the masters, and
    divided by the sum of the learning rates it is everybody's momentum.

    Weight decay acts on the masters. Source: Lu et al., "0/1 Adam" (arXiv 2202.06009), algorithm 1.
    """

    ROOMS: ClassVar[Mapping[str, Room]] = {
        "drift": Room.OWN,
        "drift_error": Room.OWN,
        "drift_server_error": Room.SHARD,
        "momentum": Room.OWN,
    }
    ERRORS: ClassVar[tuple[str, str]] = ("drift_error", "drift_server_error")

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        for number, momentum in enumerate(self._kept["momentum"]):
            momentum.copy_(self._stepper.state(number, "exp_avg"))

    def step(self, scale: float, used: frozenset[str], exchanges: bool) -> None:
        """See :class:`Way`."""
        self._stepper.add_rates(used)
        for number in self._updating():
            momentum, drift = self._kept["momentum"][number], self._kept["drift"][number]
            local, runs = self._parts.gradients[number].local_sum(), self._stepper.runs(number, used)
            self._stepper.average(momentum, local, scale, runs)
            master = self._stepper.state(number, "master")
            for run in runs:
                for piece in run.pieces():
                    drift[piece].add_(momentum[piece] * run.lr)
                    decay_(master[piece], run)
                    self._stepper.look(master[piece])
            if not exchanges:
                self._write(number)
        if exchanges:
            drifted = frozenset(self._stepper.rates)
            self._average(drifted, "the drift", self._drifted(drifted), self._kept["drift"].__getitem__, 1.0)
            self._stepper.rates.clear()

    def _drifted(self, names: frozenset[str]) -> list[int]:
        return [
            number
            for number in range(len(self._parts.masters))
            if not names.isdisjoint(spec.name for spec in self._layout(number).specs)
        ]

    def _averaged(self, number: int, average: torch.Tensor, used: frozenset[str]) -> None:
        master, common = (self._stepper.state(number, kind) for kind in ("master", "exp_avg"))
        variance = self._stepper.state(number, "exp_avg_sq")
        for run in self._stepper.runs(number, used):
            for piece in run.pieces():
                update = average[piece] / denominator(variance[piece], run.eps)
                self._stepper.look(master[piece].sub_(update))
                common[piece].copy_(average[piece] / run.rate)
            whole = slice(run.begin, run.end)
            self._kept["momentum"][number][whole].copy_(common[whole])
        self._kept["drift"][number].zero_()
        self._parts.masters[number].write_output()

    def restore(self) -> None:
        """See :class:`Way`."""
        for number in range(len(self._parts.masters)):
            self._write(number)

    def _write(self, number: int) -> None:
        master, flat = self._stepper.state(number, "master"), self._parts.masters[number].unit.flat
        drift, variance = self._kept["drift"][number], self._stepper.state(number, "exp_avg_sq")
        flat.copy_(master)
        for run in self._stepper.runs(number, frozenset(self._stepper.rates)):
            for piece in run.pieces():
                apart = drift[piece] / denominator(variance[piece], run.eps)
                flat[piece].copy_(master[piece] - apart)
