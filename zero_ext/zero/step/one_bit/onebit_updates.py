"""Which steps exchange signs, and how: the updates of the one-bit family."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from zero_ext import ops
from zero_ext.comm import Collectives
from zero_ext.config import Tier
from zero_ext.optim.one_bit.compression_phase import Phase
from zero_ext.optim.one_bit.onebit_stepper import OneBitStepper
from zero_ext.zero.gradients.accumulator import UnitGradients
from zero_ext.zero.gradients.squared_norms import Squares
from zero_ext.zero.step.auxiliary_state import Kept
from zero_ext.zero.step.one_bit.exchange_base import PREFIX, Parts, Way
from zero_ext.zero.step.one_bit.lamb_exchange import LambSigns
from zero_ext.zero.step.one_bit.stage0_exchange import GradientSigns, MomentumSigns
from zero_ext.zero.step.one_bit.stage1_exchange import ShardedSigns
from zero_ext.zero.step.one_bit.zero_one_exchange import LocalSteps
from zero_ext.zero.step.update_schedule import AfterBackward
from zero_ext.zero.units.master_weights import MasterShard
from zero_ext.zero.units.unit import Unit

_log = logging.getLogger(__name__)
_REPLICATED: dict[Phase, type[Way]] = {
    Phase.GRADIENT: GradientSigns,
    Phase.MOMENTUM: MomentumSigns,
    Phase.SCALED: LambSigns,
    Phase.LOCAL: LocalSteps,
    Phase.DRIFT: LocalSteps,
}
_SHARDED: dict[Phase, type[Way]] = {Phase.GRADIENT: ShardedSigns}


class CompressedUpdates(AfterBackward):
    """Updates of an optimizer that exchanges signs in some steps. In those, gradients stay on their rank
    (``keeps_local``), and the exchange is part of the step. The optimizer and ``made``, the number of steps
    made, decide what the next one exchanges. A single rank exchanges nothing, but freezes the variance.

    What exchanges leave behind is reset where another kind of exchange begins.
    """

    obeys_scale = False

    def __init__(
        self,
        stepper: OneBitStepper,
        masters: Sequence[MasterShard],
        gradients: Mapping[Unit, UnitGradients],
        collectives: Collectives,
        made: Callable[[], int],
    ) -> None:
        super().__init__(stepper, masters, gradients, collectives)
        self._one_bit = stepper
        self._made = made
        self._sharded = any(master.unit.placement.optimizer for master in masters)
        self._ways = _SHARDED if self._sharded else _REPLICATED
        self._parts = Parts(stepper, self._masters, self._gradients, collectives)
        self._way: Way | None = None

    @property
    def keeps_local(self) -> bool:
        """See :class:`AfterBackward`."""
        return self._phase.compresses and self._collectives.world_size > 1

    @property
    def drifts(self) -> bool:
        """See :class:`AfterBackward`."""
        return bool(self._one_bit.rates)

    @property
    def _phase(self) -> Phase:
        return self._one_bit.optimizer.phase(self._made() + 1, self._sharded)

    def begin_backward(self, last: bool, scale: torch.Tensor) -> None:
        """See :class:`AfterBackward`."""
        if self.keeps_local and any(gradients.home.valid for gradients in self._gradients):
            raise RuntimeError(
                "backward adds to gradients of the last step in full precision, which are averaged over the "
                "ranks already, but from this step on gradients stay on their rank and signs are exchanged; "
                "call optimizer.zero_grad() between the two"
            )

    def not_finite(self) -> list[int]:
        """See :class:`AfterBackward`."""
        squares = Squares()
        for gradients in self._gradients:
            if gradients.has_local:
                squares.add(gradients.local_sum())
        bad = not torch.isfinite(ops.squared_norm_value(squares.total()))
        flags = torch.zeros(self._collectives.world_size, dtype=torch.int64, device="cpu")
        flags[self._collectives.rank] = int(bad)
        return self._collectives.sum_(flags, "agreement on finite gradients").nonzero().flatten().tolist()

    def run(self, scale: torch.Tensor, used: frozenset[str]) -> None:
        """See :class:`AfterBackward`."""
        phase = self._phase
        if not phase.compresses:
            super().run(scale, used)
            return
        self._one_bit.count(used)
        if not self._one_bit.optimizer.phase(self._made(), self._sharded).compresses:
            self._raise_variance()
        if self._collectives.world_size == 1 and not self._ways[phase].ALONE:
            self._step_alone(float(scale), used)
            return
        if type(self._way) is not self._ways[phase]:
            self._way = self._ways[phase](self._parts)
        self._way.step(float(scale), used & self._one_bit.names, phase is not Phase.LOCAL)

    def _raise_variance(self) -> None:
        if self._one_bit.optimizer.variance_floor:
            for number, master in enumerate(self._masters):
                self._one_bit.raise_variance(number, master.unit.layout.shard_numel)

    def _step_alone(self, scale: float, used: frozenset[str]) -> None:
        for number, gradients in enumerate(self._gradients):
            if gradients.contributed:
                gradient = gradients.for_optimizer()
                runs = self._one_bit.runs(number, used)
                momentum = self._one_bit.state(number, "exp_avg")
                self._one_bit.average(momentum, gradient.read(0, gradient.numel), scale, runs)
                self._one_bit.descend(number, runs)
                self._masters[number].write_output()

    # -- checkpoints --------------------------------------------------------------------------------------

    def kept(self) -> Iterator[Kept]:
        """See :class:`AfterBackward`."""
        return iter(()) if self._way is None else self._way.kept()

    def make_kept(self, kinds: Mapping[str, tuple[str, ...]]) -> Callable[[], None]:
        """See :class:`AfterBackward`."""
        stored = {kind for each in kinds.values() for kind in each if kind.startswith(PREFIX)}
        before, self._way = self._way, None
        for way in self._ways.values():
            alone = self._collectives.world_size == 1 and not way.ALONE
            if stored and not alone and stored.issuperset(way.names(self._collectives).values()):
                self._way = way(self._parts)
        if stored and self._way is None and self._collectives.rank == 0:
            _log.warning(
                "the checkpoint holds errors of compression of other ranks, another stage or optimizer (%s): "
                "they start at zero here, and what the exchanges before had lost stays lost",
                ", ".join(sorted(stored)[:3]),
            )

        def undo() -> None:
            self._way = before

        return undo

    def leaves(self, kind: str) -> bool:
        """See :class:`AfterBackward`."""
        return kind.startswith(PREFIX) and self._way is None

    def restore(self) -> None:
        """See :class:`AfterBackward`."""
        if self._way is not None:
            self._way.restore()

    def held_bytes(self) -> Mapping[Tier, int]:
        """See :class:`AfterBackward`: what exchanges left behind."""
        return {"device": 0 if self._way is None else self._way.held_bytes()}
