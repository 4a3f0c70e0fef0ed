"""The optimizer step: the factor of the gradients, overflow, the update, and what is counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zero_ext.comm import Collectives
from zero_ext.config import ZeroConfig
from zero_ext.config.events import Bus, StepEnd
from zero_ext.offload import Tiers
from zero_ext.optim import OwnedRange, Segment, Stepper
from zero_ext.zero.gradients import UnitGradients
from zero_ext.zero.layout import Overlap
from zero_ext.zero.loss_scaler import LossScaler
from zero_ext.zero.master import MasterShard
from zero_ext.zero.norms import GradientNorms
from zero_ext.zero.together import FailedTogether
from zero_ext.zero.unit import Unit
from zero_ext.zero.update import AfterBackward, Updates


class OptimizerStep:
    """Steps the master shards by their reduced gradients and keeps count.

    ``updates`` decides when the updates run, see :class:`Updates`. ``steps`` counts all steps, those skipped
    for overflow too; ``grad_norm`` is the last step's, None when nothing asked for it; ``damage`` says why
    the state is a mixture, until a checkpoint is loaded.
    """

    def __init__(
        self,
        masters: Sequence[MasterShard],
        gradients: Mapping[Unit, UnitGradients],
        norms: GradientNorms,
        collectives: Collectives,
        tiers: Tiers,
        config: ZeroConfig,
        bus: Bus,
        scales_loss: bool,
    ) -> None:
        self._masters = tuple(masters)
        self._gradients = dict(gradients)
        self._norms = norms
        self._collectives = collectives
        self._transfers = tiers.transfers
        self._clipping = config.gradient_clipping
        self._bus = bus
        self._began = time.perf_counter()
        self.scaler = LossScaler(config.loss_scale)
        self.scales_loss = scales_loss
        self.stepper: Stepper | None = None
        self.updates: Updates | None = None
        self.groups: list[dict[str, Any]] = []
        self.steps = 0
        self.skipped_steps = 0
        self.grad_norm: float | None = None
        self.damage: str | None = None

    def attach(self, groups: list[dict[str, Any]], make: Callable[[list[OwnedRange]], Stepper]) -> None:
        """Gives every master shard its optimizer; ``groups`` are the live param groups of the user's."""
        group_of = {parameter: number for number, group in enumerate(groups) for parameter in group["params"]}
        ranges = []
        for master in self._masters:
            found = {overlap.index: overlap for overlap in master.overlaps}
            segments = []
            for number, parameter in enumerate(master.unit.parameters):
                if parameter not in group_of:
                    continue
                part = found.get(number, Overlap(number, 0, 0, 0))
                name = master.unit.layout.specs[number].name
                segments.append(
                    Segment(name, group_of[parameter], part.parameter_start, part.range_start, part.numel)
                )
            ranges.append(OwnedRange(master.state, master.output, tuple(segments)))
        self.groups = groups
        self.stepper = make(ranges)
        self.updates = AfterBackward(self.stepper, self._masters, self._gradients, self._collectives)

    def refuse_damage(self) -> None:
        """Raises ``RuntimeError`` if an earlier step broke off half-way."""
        if self.damage is not None:
            raise RuntimeError(f"this model is not usable since an earlier step failed: {self.damage}")

    def run(self) -> bool:
        """The step on settled gradients; False if fp16 gradients overflowed and it was skipped. A collective.

        Raises ``RuntimeError`` if no gradient arrived on any rank since the last step.
        """
        if self.updates is None:
            raise RuntimeError("this model was prepared without an optimizer; pass one to zero_ext.prepare")
        used = frozenset(
            gradients.unit.layout.specs[number].name
            for gradients in self._gradients.values()
            for number in gradients.contributed
        )
        if not used:
            raise RuntimeError(
                "optimizer.step() without gradients: no parameter of this model got one since the last "
                "zero_grad(). Call loss.backward() on a loss that depends on the model."
            )
        scale, overflow = self._gradient_scale()
        if self.scales_loss:
            self.scaler.update(overflow)
        if overflow:
            self.skipped_steps += 1
        else:
            try:
                self.updates.run(scale, used)
            except FailedTogether as error:
                self.damage = str(error)
                raise
        self.steps += 1
        self._collectives.wire.begin_step()
        self._transfers.begin_step()
        self._tell(overflow)
        return not overflow

    def _gradient_scale(self) -> tuple[torch.Tensor, bool]:
        scale = torch.ones((), dtype=torch.float32)
        if self.scales_loss:
            scale /= self.scaler.scale
        self.grad_norm = None
        if not (self._clipping or self.scales_loss):
            return scale, False
        norm = self._norms.total() * scale.double()
        self.grad_norm = float(norm)
        if not torch.isfinite(norm):
            if self.scales_loss:
                return scale, True
            raise FloatingPointError(
                f"rank {self._collectives.rank}: the gradient norm is {self.grad_norm}; first in "
                f"{self._norms.first_non_finite()}. Nothing was updated. Look for a division by zero or an "
                "overflow in the loss, or set gradient_clipping to 0 to step without a norm."
            )
        if self._clipping:
            scale *= torch.clamp(self._clipping / (norm + 1e-6), max=1.0).float()
        return scale, False

    def _tell(self, skipped: bool) -> None:
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        event = StepEnd(
            step=self.steps,
            loss=None,
            grad_norm=self.grad_norm,
            lr=tuple(float(group["lr"]) for group in self.groups),
            skipped=skipped,
            loss_scale=self.scaler.scale if self.scales_loss else 1.0,
            seconds=seconds,
        )
        self._bus.publish(event)
