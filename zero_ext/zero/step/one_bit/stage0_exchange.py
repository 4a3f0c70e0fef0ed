"""Ways for replicated moments (stage 0): a compressed all-reduce, after which every rank steps alike."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch

from zero_ext import ops
from zero_ext.zero.step.auxiliary_state import Room
from zero_ext.zero.step.one_bit.exchange_base import Way, resting


class ReplicatedWay(Way):
    """A way that averages a value of every element over the ranks by their signs (Tang et al., arXiv
    2102.02888, section 5). The kinds of ``ERRORS`` are the worker's error and the server's."""

    ERRORS: ClassVar[tuple[str, str]]

    def _average(
        self,
        used: frozenset[str],
        what: str,
        numbers: Sequence[int],
        values: Callable[[int], torch.Tensor],
        factor: float,
    ) -> None:
        """Hands the average of ``factor`` x ``values(number)`` [numel] of every one of ``numbers`` to
        :meth:`_averaged`. Elements of parameters not in ``used`` take no part, nor do their errors."""
        own, server = (self._kept[kind] for kind in self.ERRORS)
        exchanges = {number: self._exchange(number, what) for number in numbers}
        idle = {number: self._idle(number, used) for number in numbers}
        for number, exchange in exchanges.items():
            sent = values(number)
            with resting(sent, idle[number]), resting(own[number], idle[number]):
                exchange.scatter(sent, own[number], factor)
        for number, exchange in exchanges.items():
            received = exchange.scattered()
            with resting(server[number], idle[number], self._shard_begin(number)):
                ops.reduce_signs_(exchange.own, server[number], received, 1 / self._ranks)
            exchange.gather()
        for number, exchange in exchanges.items():
            messages, average = exchange.gathered(), self._room(number)
            with resting(average, idle[number]):
                ops.expand_signs_(average, messages, 1.0, False, self._ranks)
            self._averaged(number, average, used)
            del average

    def _room(self, number: int) -> torch.Tensor:
        """Where the average goes, float32 [numel]."""
        own = self._kept[self.ERRORS[0]][number]
        return torch.empty_like(own)

    @abstractmethod
    def _averaged(self, number: int, average: torch.Tensor, used: frozenset[str]) -> None:
        """Steps the unit of this number by the average, in :meth:`_room`'s tensor, which is as it was where
        nothing took part."""

    def _descend(self, number: int, used: frozenset[str]) -> None:
        master = self._parts.masters[number]
        self._stepper.descend(number, self._stepper.runs(number, used))
        master.write_output()


class MomentumSigns(ReplicatedWay):
    """1-bit Adam: each rank averages its own gradients into the momentum, then the ranks average that."""

    ROOMS: ClassVar[Mapping[str, Room]] = {
        "momentum_error": Room.OWN,
        "momentum_server_error": Room.SHARD,
    }
    ERRORS: ClassVar[tuple[str, str]] = ("momentum_error", "momentum_server_error")

    def step(self, scale: float, used: frozenset[str], exchanges: bool) -> None:
        """See :class:`Way`."""

        def averaged_here(number: int) -> torch.Tensor:
            momentum = self._stepper.state(number, "exp_avg")
            local = self._parts.gradients[number].local_sum()
            self._stepper.average(momentum, local, scale, self._stepper.runs(number, used))
            return momentum

        self._average(used, "the momentum", self._updating(), averaged_here, 1.0)

    def _room(self, number: int) -> torch.Tensor:
        return self._stepper.state(number, "exp_avg")

    def _averaged(self, number: int, average: torch.Tensor, used: frozenset[str]) -> None:
        self._descend(number, used)


class GradientSigns(ReplicatedWay):
    """0/1 Adam between two updates of the variance: the ranks average gradients."""

    ROOMS: ClassVar[Mapping[str, Room]] = {
        "gradient_error": Room.OWN,
        "gradient_server_error": Room.SHARD,
    }
    ERRORS: ClassVar[tuple[str, str]] = ("gradient_error", "gradient_server_error")

    def step(self, scale: float, used: frozenset[str], exchanges: bool) -> None:
        """See :class:`Way`."""

        def local(number: int) -> torch.Tensor:
            return self._parts.gradients[number].local_sum()

        self._average(used, "the gradients", self._updating(), local, scale)

    def _averaged(self, number: int, average: torch.Tensor, used: frozenset[str]) -> None:
        runs = self._stepper.runs(number, used)
        self._stepper.average(self._stepper.state(number, "exp_avg"), average, 1.0, runs)
        self._descend(number, used)
