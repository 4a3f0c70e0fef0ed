"""Updates of the 1-bit optimizers: choose the exchange strategy of each step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

import torch

from zero_ext import ops
from zero_ext.config import Tier
from zero_ext.optim.one_bit import CompressionPhase
from zero_ext.optim.one_bit_steppers import OneBitStepper
from zero_ext.zero.gradients.gradient_storage import Squares
from zero_ext.zero.step.onebit_exchanges import (
    PREFIX,
    ExchangeStrategy,
    GradientExchange,
    LambExchange,
    MomentumExchange,
    ShardedExchange,
    ZeroOneExchange,
)
from zero_ext.zero.step.update_schedule import AuxiliaryState, UpdateInputs, UpdatesAfterBackward
from zero_ext.zero.units.collective_errors import ranks_where

_log = logging.getLogger(__name__)
_REPLICATED: dict[CompressionPhase, type[ExchangeStrategy]] = {
    CompressionPhase.GRADIENT: GradientExchange,
    CompressionPhase.MOMENTUM: MomentumExchange,
    CompressionPhase.SCALED: LambExchange,
    CompressionPhase.LOCAL: ZeroOneExchange,
    CompressionPhase.DRIFT: ZeroOneExchange,
}
_SHARDED: dict[CompressionPhase, type[ExchangeStrategy]] = {CompressionPhase.GRADIENT: ShardedExchange}


class OneBitUpdates(UpdatesAfterBackward):
    """Updates of an optimizer that uses 1-bit exchanges in some steps. In those, gradients stay on their rank
    (``needs_local_gradients``), and the exchange is part of the step. The optimizer and ``made``, the number
    of steps made, decide the next exchange. A single rank exchanges nothing, but freezes the variance.

    The auxiliary state is reset where another exchange strategy begins.
    """

    obeys_scale = False

    def __init__(self, inputs: UpdateInputs, stepper: OneBitStepper, made: Callable[[], int]) -> None:
        super().__init__(inputs)
        self._inputs = inputs
        self._one_bit = stepper
        self._made = made
        self._sharded = any(master.unit.placement.optimizer for master in self._masters)
        self._strategies = _SHARDED if self._sharded else _REPLICATED
        self._strategy: ExchangeStrategy | None = None

    @property
    def needs_local_gradients(self) -> bool:
        return self._phase.compresses and self._collectives.world_size > 1

    @property
    def drifts(self) -> bool:
        return bool(self._one_bit.rates)

    def refuse_local(self, what: str) -> None:
        if self.needs_local_gradients:
            raise RuntimeError(
                f"{what}: expected averaged gradients, got a step in which the ranks exchange signs "
                "and no average exists. Clip or change gradients in steps of full precision only "
                "(1-bit Adam: up to freeze_step), or the loss."
            )

    def refuse_drift(self, what: str) -> None:
        if self.drifts:
            raise RuntimeError(
                f"{what}: expected the same parameters on all ranks, got a step between two exchanges "
                "of 0/1 Adam. Write before var_freeze_step or after a step that exchanges, or set "
                "local_step_clipper to 1."
            )

    @property
    def _phase(self) -> CompressionPhase:
        return self._one_bit.optimizer.phase(self._made() + 1, self._sharded)

    def begin_backward(self, last: bool, scale: torch.Tensor) -> None:
        if self.needs_local_gradients and any(gradients.storage.valid for gradients in self._gradients):
            raise RuntimeError(
                "backward: expected no gradients of a step before, as from this step on they stay on their "
                "rank and signs are exchanged, got averaged ones. Call optimizer.zero_grad() between the two."
            )

    def not_finite(self) -> list[int]:
        squares = Squares()
        for gradients in self._gradients:
            if gradients.has_local:
                squares.add(gradients.local_sum())
        bad = not torch.isfinite(ops.squared_norm_value(squares.total()))
        return ranks_where(self._collectives, bad, "agreement on finite gradients")

    def run(self, scale: torch.Tensor, used: frozenset[str]) -> None:
        phase = self._phase
        if not phase.compresses:
            super().run(scale, used)
            return
        self._one_bit.count(used)
        # The step before had full precision and updated the variance. Signs follow from here on.
        if not self._one_bit.optimizer.phase(self._made(), self._sharded).compresses:
            self._raise_variance()
        if self._collectives.world_size == 1 and not self._strategies[phase].SINGLE_RANK:
            self._step_alone(float(scale), used)
            return
        if type(self._strategy) is not self._strategies[phase]:
            self._strategy = self._strategies[phase](self._inputs, self._one_bit)
        self._strategy.step(float(scale), used & self._one_bit.names, phase is not CompressionPhase.LOCAL)

    def _raise_variance(self) -> None:
        if self._one_bit.optimizer.variance_floor:
            for number, master in enumerate(self._masters):
                self._one_bit.raise_variance(number, master.unit.layout.shard_numel)

    def _step_alone(self, scale: float, used: frozenset[str]) -> None:
        for number, gradients in enumerate(self._gradients):
            if gradients.contributed:
                gradient = gradients.for_optimizer()
                runs = self._one_bit.hyper_ranges(number, used)
                momentum = self._one_bit.state(number, "exp_avg")
                self._one_bit.average(momentum, gradient.read(0, gradient.numel), scale, runs)
                self._one_bit.descend(number, runs)
                self._masters[number].write_params()

    # -- checkpoints --------------------------------------------------------------------------------------

    def auxiliary_state(self) -> Iterator[AuxiliaryState]:
        return iter(()) if self._strategy is None else self._strategy.auxiliary_state()

    def prepare_auxiliary_state(self, kinds: Mapping[str, tuple[str, ...]]) -> Callable[[], None]:
        stored = {kind for each in kinds.values() for kind in each if kind.startswith(PREFIX)}
        before, self._strategy = self._strategy, None
        for strategy in self._strategies.values():
            alone = self._collectives.world_size == 1 and not strategy.SINGLE_RANK
            if stored and not alone and stored.issuperset(strategy.names(self._collectives).values()):
                self._strategy = strategy(self._inputs, self._one_bit)
        if stored and self._strategy is None and self._collectives.rank == 0:
            _log.warning(
                "the checkpoint holds errors of compression of other ranks, another stage or optimizer (%s): "
                "they start at zero here, and what the exchanges before had lost stays lost",
                ", ".join(sorted(stored)[:3]),
            )
        return lambda: setattr(self, "_strategy", before)

    def leaves(self, kind: str) -> bool:
        return kind.startswith(PREFIX) and self._strategy is None

    def restore(self) -> None:
        if self._strategy is not None:
            self._strategy.restore()

    def allocated_bytes(self) -> Mapping[Tier, int]:
        return {"device": 0 if self._strategy is None else self._strategy.allocated_bytes()}
