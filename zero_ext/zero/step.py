"""The optimizer step: the factor of the gradients, overflow, the update, and what is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from zero_ext.comm import Collectives
from zero_ext.config import ZeroConfig
from zero_ext.config.events import StepEnd
from zero_ext.offload import Tiers
from zero_ext.optim import OwnedRange, Segment, Stepper, Total
from zero_ext.optim.non_finite import NonFiniteFlag
from zero_ext.optim.one_bit.stepper import OneBitStepper
from zero_ext.zero.compressed import CompressedUpdates
from zero_ext.zero.delayed import Delayed
from zero_ext.zero.finite_checks import FiniteChecks, NonFiniteState, advice_on
from zero_ext.zero.gradients import UnitGradients
from zero_ext.zero.in_backward import InBackward
from zero_ext.zero.layout import Overlap
from zero_ext.zero.loss_scaler import LossScaler
from zero_ext.zero.master import MasterShard
from zero_ext.zero.norms import GradientNorms
from zero_ext.zero.rank_agreement import Hyperparameters, refuse_different_facts
from zero_ext.zero.together import FailedTogether, together
from zero_ext.zero.unit import Unit
from zero_ext.zero.update import MIXTURE, AfterBackward, any_stored, settings_of

Groups = list[dict[str, Any]]


class OptimizerStep:
    """Steps the master shards by their reduced gradients and keeps count.

    ``updates`` decides when the updates run; None without an optimizer. ``steps`` counts all steps, those
    skipped for overflow too; ``grad_norm`` is the last step's, None when nothing asked for it; ``damage``
    says why the state is a mixture, until a checkpoint is loaded.
    """

    def __init__(
        self,
        masters: Sequence[MasterShard],
        gradients: Mapping[Unit, UnitGradients],
        norms: GradientNorms,
        collectives: Collectives,
        tiers: Tiers,
        config: ZeroConfig,
        scales_loss: bool,
    ) -> None:
        self._masters = tuple(masters)
        self._gradients = dict(gradients)
        self._norms = norms
        self._collectives = collectives
        self._tiers = tiers
        self._clipping = config.gradient_clipping
        self._when = config.offload.step
        self._delays_after = config.offload.delay_after_steps
        self._checks = FiniteChecks(masters, gradients, collectives)
        self._flag = NonFiniteFlag(tiers.device.device) if config.check_finite else None
        self._last_pass = False
        self.scaler = LossScaler(config.loss_scale)
        self.scales_loss = scales_loss
        self.stepper: Stepper | None = None
        self.updates: AfterBackward | None = None
        self.groups: Groups = []
        self._hyperparameters = Hyperparameters((), ())
        self.steps = 0
        self.skipped_steps = 0
        self.grad_norm: float | None = None
        self.damage: str | None = None

    def attach(
        self,
        groups: Groups,
        names: Iterable[str],
        make: Callable[[list[OwnedRange], Groups, Total], Stepper],
    ) -> None:
        """Gives every master shard its optimizer; ``groups`` are the live param groups of the user's with the
        settings ``names``, and ``make`` is given those that the stepper is to read, and how it learns what
        all ranks have."""
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
            ranges.append(OwnedRange(master.state, master.step_output, tuple(segments)))
        self.groups = groups
        self._hyperparameters = Hyperparameters(groups, names)
        settings = settings_of(groups) if self._when == "delayed" else groups
        self.stepper = make(ranges, settings, self._total)
        if self._flag is not None:
            self.stepper.watch(self._flag)
        parts = (self.stepper, self._masters, self._gradients, self._collectives)
        if self._when == "in_backward":
            on_trial = bool(self._clipping) or self.scales_loss
            self.updates = InBackward(*parts, groups, on_trial)
        elif isinstance(self.stepper, OneBitStepper):
            self.updates = CompressedUpdates(
                self.stepper, *parts[1:], lambda: self.steps - self.skipped_steps
            )
        elif self._when == "delayed":
            self.updates = Delayed(*parts, groups, settings, self._tiers)
        else:
            self.updates = AfterBackward(*parts)
        self.updates.flag = self._flag

    def _total(self, own: Callable[[], torch.Tensor]) -> torch.Tensor:
        if any_stored(self._masters, [self._gradients[master.unit] for master in self._masters]):
            values = together(self._collectives, own, "reading the state for a step")
        else:
            values = own()
        sharded = any(master.unit.placement.optimizer for master in self._masters)
        return self._collectives.sum_(values, "norms of the optimizer") if sharded else values

    @property
    def pending(self) -> bool:
        """Whether updates may have been made in backward that no step has finished."""
        return self.updates is not None and self.updates.pending

    @property
    def under_way(self) -> bool:
        """Whether parameters are still to follow the updates of the last step."""
        return self.updates is not None and self.updates.under_way

    @property
    def keeps_local(self) -> bool:
        """Whether the next step wants gradients unreduced."""
        return self.updates is not None and self.updates.keeps_local

    def checksum(self) -> int:
        """Return what is the same on ranks whose param groups have the same settings."""
        return self._hyperparameters.checksum()

    def refuse_different(self) -> None:
        """Raise ``RuntimeError`` on all ranks if their param groups have other settings; a collective."""
        updated = self.updates is not None and self.updates.updated
        outcome = MIXTURE if updated else "Nothing was updated."
        advice = f"{outcome} Give all ranks the same value. A scheduler needs a metric that they agree on."
        try:
            refuse_different_facts(self._collectives, list(self._hyperparameters.facts()), advice)
        except RuntimeError as error:
            if updated:
                self.damage = str(error)
            raise

    def refuse_local(self, what: str) -> None:
        """Raises ``RuntimeError`` where the next step exchanges signs: averaged gradients do not exist."""
        if self.keeps_local:
            raise RuntimeError(
                f"{what}: the ranks exchange signs in this step, so averaged gradients do not exist, nor "
                "their norm. Clip or change gradients in steps of full precision only (1-bit Adam: up to "
                "freeze_step), or the loss."
            )

    def refuse_drift(self, what: str) -> None:
        """Raises ``RuntimeError`` while the parameters differ between the ranks."""
        if self.updates is not None and self.updates.drifts:
            raise RuntimeError(
                f"{what} between two exchanges of 0/1 Adam, while every rank has parameters of its own. "
                "Write before var_freeze_step or after a step that exchanges, or set local_step_clipper to 1"
            )

    def wait(self) -> None:
        """Returns when no update runs any more. Raises what made it fail on this rank."""
        if self.updates is not None:
            self.updates.wait()

    def finish(self) -> None:
        """Makes the parameters follow the updates of the last step; a collective."""
        if self.updates is not None and self.updates.under_way:
            self._guarded(lambda updates: updates.finish())
            self._guarded(lambda updates: self._refuse_state(self.steps))

    @property
    def clears_gradients(self) -> bool:
        """Whether a step forgets its gradients."""
        return self.updates is not None and self.updates.clears

    def begin_backward(self, last: bool) -> None:
        """A backward pass begins; ``last`` says that it is the last of its step."""
        self._last_pass = last
        if self.updates is not None:
            self.updates.begin_backward(last, self._unscale())

    def came(self, gradients: UnitGradients) -> None:
        """A gradient of this unit arrives."""
        if self.updates is not None:
            self.updates.came(gradients)

    def reduced(self, gradients: UnitGradients) -> None:
        """A reduction of this unit is finished. A gradient that is not finite makes no update: the step will
        refuse it."""
        if self.updates is not None and self._look_at(gradients):
            self.updates.reduced(gradients)

    def _look_at(self, gradients: UnitGradients) -> bool:
        """Look at a reduced gradient, if it is the step's last; return False if it is not finite."""
        if not (self._last_pass and self._looks_at_gradients):
            return True
        if gradients.home.is_late and self._when != "in_backward":
            return True  # the host would wait for it to come from the device; the step looks at it
        return self._checks.look_at(gradients)

    @property
    def _looks_at_gradients(self) -> bool:
        """Whether gradients are looked at themselves: their norm, where there is one, tells it too."""
        return self._flag is not None and not (self._clipping or self.scales_loss or self.keeps_local)

    def read(self, gradients: UnitGradients, index: int) -> None:
        """Backward runs code of the model again that reads parameter ``index`` of this unit."""
        if self.updates is not None:
            self.updates.read(gradients, index)

    def forget_gradients(self) -> None:
        """The gradients are cleared. Raises ``RuntimeError`` if a step in backward has used them."""
        self._checks.forget()
        if self.updates is not None:
            self.damage = self.updates.forget() or self.damage

    def abandon(self) -> None:
        """A backward pass broke off."""
        if self.updates is not None:
            self.damage = self.updates.abandon() or self.damage

    def forget_damage(self) -> None:
        """State and parameters were replaced."""
        self.damage = None
        if self._flag is not None:
            self._flag.lower()
        if self.updates is not None:
            self.updates.drop()

    def refuse_pending(self, what: str) -> None:
        """Raises ``RuntimeError`` between a backward pass that makes updates and its step."""
        if self.pending:
            raise RuntimeError(
                f"{what} between backward and optimizer.step(): offload.step is 'in_backward', so some units "
                "are updated, some are not, and gradients are used up. Call optimizer.step() first. To clip, "
                "set gradient_clipping; to read or change gradients, set offload.step to 'after_backward'."
            )

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
        if self._flag is not None and self._flag.waits:
            # The last step did not wait for the kernels of its updates, which have ended by now.
            self._guarded(lambda updates: self._refuse_state(self.steps))
        scale, overflow = self._gradient_scale()
        self.finish()
        if self.scales_loss:
            self.scaler.update(overflow, self._name_overflow)
        if overflow:
            self.skipped_steps += 1
        else:
            self._guarded(lambda updates: updates.run(scale, used))
            if self.steps < self._delays_after:
                self.finish()
            if self._flag is not None and not (self._flag.waits or self.under_way):
                self._guarded(lambda updates: self._refuse_state(self.steps + 1))
        self.steps += 1
        self._collectives.wire.begin_step()
        self._tiers.transfers.begin_step()
        return not overflow

    def begin_delayed(self) -> None:
        """The step is counted and told: updates that run beside the next one may start."""
        if self.updates is not None:
            self.updates.begin_delayed()

    def _guarded(self, action: Callable[[AfterBackward], None]) -> None:
        if self.updates is None:
            raise AssertionError("a step without an optimizer")
        try:
            action(self.updates)
        except FailedTogether as error:
            self.damage = str(error)
            raise

    def _unscale(self) -> torch.Tensor:
        scale = torch.ones((), dtype=torch.float32, device="cpu")
        if self.scales_loss:
            scale /= self.scaler.scale
        return scale

    def _gradient_scale(self) -> tuple[torch.Tensor, bool]:
        scale = self._unscale()
        self.grad_norm = None
        if self.keeps_local:
            return scale, self._refuse_local_overflow()
        if not (self._clipping or self.scales_loss):
            if self._looks_at_gradients:
                self._refuse_gradients()
            return scale, False
        norm = self._norms.total() * scale.double()
        self.grad_norm = float(norm)
        if not torch.isfinite(norm):
            self._guarded(lambda updates: updates.take_back())
            if self.scales_loss:
                return scale, True
            raise self._bad_gradients(f" (their norm is {self.grad_norm})")
        if self._clipping:
            scale *= torch.clamp(self._clipping / (norm + 1e-6), max=1.0).float()
        return scale, False

    def _refuse_local_overflow(self) -> bool:
        """Whether unreduced gradients overflowed on any rank. Raises ``FloatingPointError`` unless they are
        scaled."""
        if self._flag is None and not self.scales_loss:
            return False
        ranks = self.updates.not_finite() if self.updates is not None else []
        if ranks and not self.scales_loss:
            raise self._bad_gradients(f" on ranks {ranks}")
        return bool(ranks)

    def _refuse_gradients(self) -> None:
        """Raise ``FloatingPointError`` on all ranks if a reduced gradient is not finite on any; a
        collective."""

        def look() -> bool:
            return not self._checks.gradients_are_finite()

        found = self._norms.read_together(look)
        updated = self.updates is not None and self.updates.updated
        bad, mixed = self._checks.agree((found, updated), "finite gradients")
        if not bad:
            return
        error = self._bad_gradients("", mixed)
        if mixed:
            self.damage = str(error)
            self._guarded(lambda updates: updates.drop())
        else:
            self._guarded(lambda updates: updates.take_back())
        raise error

    def _bad_gradients(self, more: str, mixed: bool = False) -> FloatingPointError:
        """Return the error of gradients that are not finite; a collective."""
        names = self._checks.names(local=self.keeps_local)
        outcome = (
            "Units whose gradients came earlier were updated during backward (offload.step is "
            f"'in_backward'). {MIXTURE} With gradient_clipping such updates are taken back."
            if mixed
            else "No parameter or optimizer state was changed."
        )
        return FloatingPointError(
            f"rank {self._collectives.rank}: gradients of step {self.steps + 1}: expected finite values, got "
            f"NaN or infinity in {names.describe(names.gradients)}{more}. {outcome} {advice_on(names)}"
        )

    def _name_overflow(self) -> str:
        """Return which gradients overflowed, and what to do; a collective."""
        names = self._checks.names(local=self.keeps_local)
        found = f"NaN or infinity in {names.describe(names.gradients)}."
        return f"{found} {advice_on(names)}" if names.weights else found

    def _refuse_state(self, step: int) -> None:
        """Raise :class:`NonFiniteState` on all ranks if the update of ``step`` left NaN or infinity on any; a
        collective."""
        if self._flag is None or not self._checks.agree([self._flag.lower()], "finite weights")[0]:
            return
        names = self._checks.names(self.stepper)
        what, found = ("weights", names.weights) if names.weights else ("moments", names.moments)
        raise NonFiniteState(
            f"rank {self._collectives.rank}: {what} after step {step}: expected finite values, got NaN or "
            f"infinity in {names.describe(found)}. The step was made, and its gradients were finite: the "
            "update overflowed or divided by zero, or the weights were not finite before it. Load the last "
            "checkpoint, and lower the learning rate or raise eps."
        )

    def end(self, skipped: bool, loss: float | None, seconds: float) -> StepEnd:
        """What is told of the step that ended."""
        return StepEnd(
            step=self.steps,
            loss=loss,
            grad_norm=self.grad_norm,
            lr=tuple(float(group["lr"]) for group in self.groups),
            skipped=skipped,
            loss_scale=self.scaler.scale if self.scales_loss else 1.0,
            seconds=seconds,
            taken_back=self.updates is not None and self.updates.taken_back,
        )
