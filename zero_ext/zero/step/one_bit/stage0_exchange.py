"""1-bit exchange for replicated moments (stage 0): a compressed all-reduce before identical updates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch

from zero_ext import ops
from zero_ext.zero.step.one_bit.exchange_base import ExchangeStrategy, temporarily_zeroed
from zero_ext.zero.step.update_schedule import Ownership


class ReplicatedExchange(ExchangeStrategy):
    """Averages one value per element over the ranks with sign compression (Tang et al., arXiv 2102.02888,
    section 5). ``ERRORS`` names the state of the worker's and of the server's compression error."""

    ERRORS: ClassVar[tuple[str, str]]

    def _average(
        self,
        used: frozenset[str],
        what: str,
        numbers: Sequence[int],
        values: Callable[[int], torch.Tensor],
        factor: float,
    ) -> None:
        """Pass the average of ``factor`` x ``values(number)`` [numel] of each of ``numbers`` to
        :meth:`_averaged`. Elements of parameters not in ``used`` and their errors are left out."""
        own, server = (self._state[kind] for kind in self.ERRORS)
        exchanges = {number: self._exchange(number, what) for number in numbers}
        idle = {number: self._idle(number, used) for number in numbers}
        # One loop over all units per phase, so that a payload is on its way while
        # other units are computed.
        for number, exchange in exchanges.items():
            sent = values(number)
            with temporarily_zeroed(sent, idle[number]), temporarily_zeroed(own[number], idle[number]):
                exchange.scatter(sent, own[number], factor)
        for number, exchange in exchanges.items():
            received = exchange.scattered()
            with temporarily_zeroed(server[number], idle[number], self._shard_begin(number)):
                ops.reduce_1bit_(exchange.own, server[number], received, 1 / self._ranks)
            exchange.gather()
        for number, exchange in exchanges.items():
            messages, average = exchange.gathered(), self._average_buffer(number)
            with temporarily_zeroed(average, idle[number]):
                ops.decompress_1bit_(average, messages, 1.0, False, self._ranks)
            self._averaged(number, average, used)
            # Otherwise it would live until the buffer of the next unit has been allocated.
            del average

    def _average_buffer(self, number: int) -> torch.Tensor:
        """Return memory for the average, float32 [numel]."""
        own = self._state[self.ERRORS[0]][number]
        return torch.empty_like(own)

    @abstractmethod
    def _averaged(self, number: int, average: torch.Tensor, used: frozenset[str]) -> None:
        """Update the unit of this number with the average, which is in :meth:`_average_buffer`'s tensor.
        Elements that were left out are unchanged there."""

    def _descend(self, number: int, used: frozenset[str]) -> None:
        master = self._context.masters[number]
        self._stepper.descend(number, self._stepper.hyper_ranges(number, used))
        master.write_params()


class MomentumExchange(ReplicatedExchange):
    """1-bit Adam: each rank averages its own gradients into the momentum, then the ranks average that."""

    OWNERSHIP: ClassVar[Mapping[str, Ownership]] = {
        "momentum_error": Ownership.OWN,
        "momentum_server_error": Ownership.SHARD,
    }
    ERRORS: ClassVar[tuple[str, str]] = ("momentum_error", "momentum_server_error")

    def step(self, scale: float, used: frozenset[str], exchanges: bool) -> None:
        """See :class:`ExchangeStrategy`."""

        def local_average(number: int) -> torch.Tensor:
            momentum = self._stepper.state(number, "exp_avg")
            local = self._context.gradients[number].local_sum()
            self._stepper.average(momentum, local, scale, self._stepper.hyper_ranges(number, used))
            return momentum

        self._average(used, "the momentum", self._updating(), local_average, 1.0)

    def _average_buffer(self, number: int) -> torch.Tensor:
        return self._stepper.state(number, "exp_avg")

    def _averaged(self, number: int, average: torch.Tensor, used: frozenset[str]) -> None:
        self._descend(number, used)


class GradientExchange(ReplicatedExchange):
    """0/1 Adam between two updates of the variance: the ranks average gradients."""

    OWNERSHIP: ClassVar[Mapping[str, Ownership]] = {
        "gradient_error": Ownership.OWN,
        "gradient_server_error": Ownership.SHARD,
    }
    ERRORS: ClassVar[tuple[str, str]] = ("gradient_error", "gradient_server_error")

    def step(self, scale: float, used: frozenset[str], exchanges: bool) -> None:
        """See :class:`ExchangeStrategy`."""

        def local(number: int) -> torch.Tensor:
            return self._context.gradients[number].local_sum()

        self._average(used, "the gradients", self._updating(), local, scale)

    def _averaged(self, number: int, average: torch.Tensor, used: frozenset[str]) -> None:
        runs = self._stepper.hyper_ranges(number, used)
        self._stepper.average(self._stepper.state(number, "exp_avg"), average, 1.0, runs)
        self._descend(number, used)
