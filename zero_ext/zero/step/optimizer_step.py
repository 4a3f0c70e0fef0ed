"""The optimizer step: the factor of the gradients, overflow, the update, and what is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from zero_ext.comm import Collectives
from zero_ext.config import ZeroConfig
from zero_ext.config.events import StepEnd
from zero_ext.offload import TierManager
from zero_ext.optim import OwnedRange, Stepper, Total
from zero_ext.optim.one_bit.onebit_stepper import OneBitStepper
from zero_ext.optim.steppers.non_finite_flag import NonFiniteFlag
from zero_ext.zero.construction.rank_consistency import Hyperparameters
from zero_ext.zero.gradients.accumulator import UnitGradients
from zero_ext.zero.gradients.gradient_norms import GradientNorms
from zero_ext.zero.gradients.reducer import Edits
from zero_ext.zero.step.delayed_update import DelayedUpdates
from zero_ext.zero.step.finite_checks import FiniteChecks
from zero_ext.zero.step.loss_scaler import LossScaler
from zero_ext.zero.step.one_bit import OneBitUpdates
from zero_ext.zero.step.step_errors import DeviceErrors, StepErrors
from zero_ext.zero.step.step_verdict import (
    DecidedStep,
    LaunchedSteps,
    OwnFacts,
    Verdict,
    gradient_scale,
    sum_of_ranks,
)
from zero_ext.zero.step.update_in_backward import UpdatesInBackward
from zero_ext.zero.step.update_schedule import MIXTURE, UpdatesAfterBackward, any_stored, settings_of
from zero_ext.zero.units.collective_errors import CollectiveError, raise_on_all_ranks
from zero_ext.zero.units.master_weights import MasterShard
from zero_ext.zero.units.unit import Unit

Groups = list[dict[str, Any]]
_CPU = torch.device("cpu")


class OptimizerStep:
    """Steps the master shards by their reduced gradients and keeps count.

    ``updates`` decides when the updates run; None without an optimizer. ``steps`` counts all steps, those
    skipped for overflow too; ``damage`` says why the state is a mixture, until a checkpoint is loaded.

    Where state, gradients and parameters are in an accelerator's memory, kernels obey a step's verdict
    before the host knows it. If it is bad, that step and all that were launched since change nothing. The
    host looks at verdicts that have arrived when the ranks agree on a step's gradients, and waits for them
    where state is read or written. Then it takes its counts back and raises on all ranks.
    """

    def __init__(
        self,
        masters: Sequence[MasterShard],
        gradients: Mapping[Unit, UnitGradients],
        norms: GradientNorms,
        collectives: Collectives,
        tiers: TierManager,
        config: ZeroConfig,
        scales_loss: bool,
    ) -> None:
        self._masters = tuple(masters)
        self._gradients = dict(gradients)
        self._norms = norms
        self._collectives = collectives
        self._tiers = tiers
        self._clipping = config.gradient_clipping
        self._when = config.offload.update_mode
        self._delays_after = config.offload.delay_start_step
        self._checks = FiniteChecks(masters, gradients, collectives)
        self._flag = NonFiniteFlag() if config.check_finite else None
        self._errors = StepErrors(collectives, self._checks)
        self._device_errors = DeviceErrors(collectives, tiers.device)
        self._last_pass = False
        self.scaler = LossScaler(config.loss_scale)
        self.scales_loss = scales_loss
        self.stepper: Stepper | None = None
        self.updates: UpdatesAfterBackward | None = None
        self.groups: Groups = []
        self._hyperparameters = Hyperparameters((), ())
        self.steps = 0
        self.skipped_steps = 0
        self.damage: str | None = None
        self.factor = 1.0  # of all gradients, left by clipping
        self._verdict: Verdict | None = None  # of the last step
        self._launched = LaunchedSteps()
        self._known_to_all = False  # that some rank has seen a bad verdict
        self._unjudged = False  # whether a step may still prove not to have been made

    def attach(
        self,
        groups: Groups,
        names: Iterable[str],
        make: Callable[[Sequence[OwnedRange], Groups, Total], Stepper],
    ) -> None:
        """Create the stepper with ``make`` and its update schedule. ``groups`` are the user's live param
        groups with the settings ``names``."""
        group_of = {parameter: number for number, group in enumerate(groups) for parameter in group["params"]}
        for master in self._masters:
            master.set_groups(group_of)
        self.groups = groups
        self._hyperparameters = Hyperparameters(groups, names)
        settings = settings_of(groups) if self._when == "delayed" else groups
        self.stepper = make(self._masters, settings, self._total)
        if self._flag is not None:
            self.stepper.watch(self._flag)
        shared = (self.stepper, self._masters, self._gradients, self._collectives)
        if self._when == "in_backward":
            on_trial = bool(self._clipping) or self.scales_loss
            self.updates = UpdatesInBackward(*shared, groups, on_trial)
        elif isinstance(self.stepper, OneBitStepper):
            self.updates = OneBitUpdates(self.stepper, *shared[1:], lambda: self.steps - self.skipped_steps)
        elif self._when == "delayed":
            self.updates = DelayedUpdates(*shared, groups, settings, self._tiers)
        else:
            self.updates = UpdatesAfterBackward(*shared)
        self.updates.flag = self._flag

    def _total(self, own: Callable[[], torch.Tensor]) -> torch.Tensor:
        if any_stored(self._masters, [self._gradients[master.unit] for master in self._masters]):
            values = raise_on_all_ranks(self._collectives, own, "reading the state for a step")
        else:
            values = own()
        sharded = any(master.unit.placement.optimizer for master in self._masters)
        return self._collectives.sum_(values, "norms of the optimizer") if sharded else values

    @property
    def pending(self) -> bool:
        """Whether updates may have been made in backward that no step has finished."""
        return self.updates is not None and self.updates.pending

    @property
    def in_progress(self) -> bool:
        """Whether parameters are still to follow the updates of the last step."""
        return self.updates is not None and self.updates.in_progress

    @property
    def needs_local_gradients(self) -> bool:
        """Whether the next step wants gradients unreduced."""
        return self.updates is not None and self.updates.needs_local_gradients

    def refuse_local(self, what: str) -> None:
        """Raises ``RuntimeError`` where the next step exchanges signs: averaged gradients do not exist."""
        if self.needs_local_gradients:
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
        """Return when no update runs and counts are those of the steps made; raises what failed here."""
        if self.updates is not None:
            self.updates.wait()
        self._look(wait=True)

    def finish(self) -> None:
        """Makes the parameters follow the updates of the last step; a collective."""
        if self.updates is not None and self.updates.in_progress:
            self._guarded(lambda updates: updates.finish())
            self._guarded(lambda updates: self._refuse_state(self.steps))

    # -- verdicts -----------------------------------------------------------------------------------------

    @property
    def grad_norm(self) -> float | None:
        """Norm of the last step's gradients before clipping, None if nothing asked for it; waits for it."""
        return None if self._verdict is None else self._verdict.read().norm

    @property
    def grad_norm_tensor(self) -> torch.Tensor | None:
        """:attr:`grad_norm` as a 0-d float64 tensor where it was computed; nobody waits for it."""
        return None if self._verdict is None else self._verdict.norm

    @property
    def late_norm(self) -> torch.Tensor | None:
        """:attr:`grad_norm_tensor`, None if the host knows it."""
        return self.grad_norm_tensor if self._launched else None

    def has_failed_step(self) -> bool:
        """Return whether this rank knows, without waiting, that an earlier step was not made."""
        self._look(wait=False)
        return self._launched.seen_bad

    def notify_failed_step(self, bad: bool) -> None:
        """Store whether an earlier step was not made on any rank. The next step raises the error."""
        self._known_to_all = bad

    def judge(self) -> None:
        """Wait for the verdicts on all steps so far.

        A collective. Raises on all ranks why a step was not made, if one was not: ``FloatingPointError`` for
        gradients, weights or moments that are not finite, ``RuntimeError`` for anything else.
        """
        if not self._unjudged:
            return
        self._unjudged = False
        self._known_to_all = False
        self._look(wait=True)
        bad = self._launched.pop_bad()
        if bad is not None:
            self._refuse(bad, late=True)
        if self.updates is not None and not self.in_progress:
            self._refuse_last_update()

    def _look(self, wait: bool) -> None:
        bad = self._launched.look(wait)
        if bad is not None:
            self._undo_counts(bad)

    def _undo_counts(self, step: DecidedStep) -> None:
        if self.stepper is not None:
            self.stepper.load_scalars(step.scalars)
        self.steps = step.number - 1

    @property
    def _waits_for_flag(self) -> bool:
        """Whether the host reads the flag of an update later than in its step."""
        return self._flag is not None and self._tiers.device.is_accelerator

    @property
    def _judges_on_device(self) -> bool:
        """Whether kernels obey the verdict on a step before the host knows it."""
        return (
            self.stepper is not None
            and self.updates is not None
            and self.updates.obeys_scale
            and self.stepper.reads_scale_on_device
            and self._collectives.model is None
            and self._norms.on_device
        )

    def _decide(self, edits: Edits) -> DecidedStep:
        """Add up over the ranks what decides on the step; a collective."""
        needs_norm = bool(self._clipping or self.scales_loss) and not self.needs_local_gradients
        found = self._looks_at_gradients and self._norms.read_on_all_ranks(
            lambda: not self._checks.gradients_are_finite()
        )
        flag = self._flag if self._waits_for_flag and not self.in_progress else None
        raised = flag is not None and flag.is_raised_on(_CPU)
        updated = self.updates is not None and self.updates.updated
        checksums = self._hyperparameters.checksum(), 1 + edits.checksum
        facts = OwnFacts(*checksums, bool(found), raised, updated)
        error = self._device_errors.poll()
        squares = self._norms.own() if needs_norm else None
        sums = sum_of_ranks(self._collectives, self._tiers.device, facts, squares, flag, error)
        verdict = Verdict(sums, self._collectives.world_size, self._unscale(), error)
        scalars = self.stepper.scalars() if self.stepper is not None else {}
        return DecidedStep(self.steps + 1, verdict, squares, edits.last, scalars)

    @property
    def clears_gradients(self) -> bool:
        """Whether a step forgets its gradients."""
        return self.updates is not None and self.updates.clears

    def begin_backward(self, last: bool) -> None:
        """A backward pass begins; ``last`` says that it is the last of its step."""
        self._last_pass = last
        if self.updates is not None:
            self.updates.begin_backward(last, self._unscale())

    def gradient_arrived(self, gradients: UnitGradients) -> None:
        """Handle a new gradient of this unit."""
        if self.updates is not None:
            self.updates.gradient_arrived(gradients)

    def reduced(self, gradients: UnitGradients) -> None:
        """Handle a finished reduction of this unit. Only finite gradients start an update."""
        if self.updates is not None and self._look_at(gradients):
            self.updates.reduced(gradients)

    def _look_at(self, gradients: UnitGradients) -> bool:
        """Look at a reduced gradient, if it is the step's last; return False if it is not finite."""
        if not (self._last_pass and self._looks_at_gradients):
            return True
        if gradients.storage.is_async and self._when != "in_backward":
            return True  # the host would wait for it to come from the device; the step looks at it
        return self._checks.look_at(gradients)

    @property
    def _looks_at_gradients(self) -> bool:
        """Whether gradients are looked at themselves: their norm, where there is one, tells it too."""
        return self._flag is not None and not (
            self._clipping or self.scales_loss or self.needs_local_gradients
        )

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
        self._launched.clear()
        self._verdict = None
        self._known_to_all = False
        self._device_errors.poll()
        if self._flag is not None:
            self._flag.lower()
        if self.updates is not None:
            self.updates.drop()

    def refuse_pending(self, what: str) -> None:
        """Raises ``RuntimeError`` between a backward pass that makes updates and its step."""
        if self.pending:
            raise RuntimeError(
                f"{what} between backward and optimizer.step(): offload.update_mode is 'in_backward', so "
                "some units are updated, some are not, and gradients are used up. Call optimizer.step() "
                "first. To clip, set gradient_clipping. To read or change gradients, set "
                "offload.update_mode to 'after_backward'."
            )

    def refuse_damage(self) -> None:
        """Raises ``RuntimeError`` if an earlier step broke off half-way."""
        if self.damage is not None:
            raise RuntimeError(f"this model is not usable since an earlier step failed: {self.damage}")

    def run(self, edits: Edits) -> bool:
        """Step with synchronized gradients, which ``edits`` changed in place; a collective. Return False
        if fp16 gradients overflowed. Raise ``RuntimeError`` if no rank has a gradient since the last step."""
        used = self._used()
        if self._known_to_all:
            self.judge()
        step = self._decide(edits)
        self._verdict = None if self.needs_local_gradients else step.verdict
        overflow = (self._launch if self._judges_on_device else self._run_judged)(step, used)
        self._device_errors.claim()
        self.skipped_steps += overflow
        self.steps += 1
        self._unjudged = self._tiers.device.is_accelerator
        self._collectives.traffic.begin_step()
        self._tiers.transfers.begin_step()
        return not overflow

    def _used(self) -> frozenset[str]:
        if self.updates is None:
            raise RuntimeError("this model was prepared without an optimizer; pass one to zero_ext.prepare")
        owned = [(each.unit.layout.specs, each.contributed) for each in self._gradients.values()]
        used = frozenset(specs[number].name for specs, numbers in owned for number in numbers)
        if not used:
            raise RuntimeError(
                "optimizer.step() without gradients: no parameter of this model got one since the last "
                "zero_grad(). Call loss.backward() on a loss that depends on the model."
            )
        return used

    def _launch(self, step: DecidedStep, used: frozenset[str]) -> bool:
        """Give the device a step that it makes if the verdict is good; then wait whether fp16 overflowed."""
        scale = step.verdict.scale(self._clipping)
        if self.scales_loss:
            self._guarded(lambda updates: updates.run(scale, used))
            findings = step.verdict.read()
            if findings.refused or findings.overflow:
                self._undo_counts(step)
            if findings.refused:
                self._refuse(step)
            self.scaler.update(findings.overflow, self._name_overflow)
            return findings.overflow
        scale = self._launched.add(step, scale)
        self._guarded(lambda updates: updates.run(scale, used))
        return False

    def _run_judged(self, step: DecidedStep, used: frozenset[str]) -> bool:
        """Make a step whose verdict the host reads first. Return whether fp16 gradients overflowed."""
        findings = step.verdict.read()
        if findings.refused or (findings.overflow and not self.scales_loss):
            self._refuse(step)
        overflow = findings.overflow or (self.needs_local_gradients and self._refuse_local_overflow())
        if findings.overflow:
            self._guarded(lambda updates: updates.rollback())
        scale = gradient_scale(self._unscale(), findings.norm_tensor(), self._clipping)
        self.finish()
        if self.scales_loss:
            self.scaler.update(overflow, self._name_overflow)
        if overflow:
            return True
        self._guarded(lambda updates: updates.run(scale, used))
        if self.steps < self._delays_after:
            self.finish()
        if not (self._waits_for_flag or self.in_progress):
            self._guarded(lambda updates: self._refuse_state(self.steps + 1))
        return False

    def begin_delayed(self) -> None:
        """Start the updates that overlap the next step, after this one is counted and published."""
        if self.updates is not None:
            self.updates.begin_delayed()

    def _guarded(self, action: Callable[[UpdatesAfterBackward], None]) -> None:
        if self.updates is None:
            raise AssertionError("a step without an optimizer")
        try:
            action(self.updates)
        except CollectiveError as error:
            self.damage = str(error)
            raise

    def _unscale(self) -> torch.Tensor:
        factor = torch.tensor(self.factor, dtype=torch.float32, device="cpu")
        return factor / self.scaler.scale if self.scales_loss else factor

    def _refuse(self, step: DecidedStep, late: bool = False) -> None:
        """Raise why ``step`` was not made; a collective. ``late`` says that others were launched since."""
        findings = step.verdict.read()
        if findings.device_error:
            own = step.verdict.read_error()
            self._guarded(lambda updates: self._device_errors.refuse(own, step.number, late))
        if findings.edits_differ:
            raise self._errors.edits(step.edited, late)
        if findings.settings_differ:
            self.damage = MIXTURE if findings.updated else self.damage
            self._errors.raise_settings(step.number, self._hyperparameters, mixed=findings.updated, late=late)
        if findings.weights:
            self._guarded(lambda updates: self._raise_state(step.number - 1))
        if not findings.updated:
            self._guarded(lambda updates: updates.rollback())
        error = self._errors.gradients(
            step.number,
            "" if findings.norm is None else f" (their norm is {findings.norm})",
            local=self.needs_local_gradients,
            mixed=findings.updated,
            known=step.non_finite() if late else None,
            late=late,
        )
        if findings.updated:
            self.damage = str(error)
            self._guarded(lambda updates: updates.drop())
        raise error

    def _refuse_local_overflow(self) -> bool:
        """Whether unreduced gradients overflowed on any rank. Raises ``FloatingPointError`` unless they are
        scaled."""
        if self._flag is None and not self.scales_loss:
            return False
        ranks = self.updates.not_finite() if self.updates is not None else []
        if ranks and not self.scales_loss:
            raise self._errors.gradients(self.steps + 1, f" on ranks {ranks}", local=True)
        return bool(ranks)

    def _name_overflow(self) -> str:
        return self._errors.overflow(self.needs_local_gradients)

    def _refuse_state(self, step: int) -> None:
        """Raise :class:`NonFiniteState` on all ranks if the update of ``step`` left NaN or infinity on any; a
        collective."""
        if self._flag is not None and self._checks.agree([self._flag.is_raised()], "finite weights")[0]:
            self._raise_state(step)

    def _refuse_last_update(self) -> None:
        """Raise what the last update left on any rank, an error, NaN or infinity; a collective that waits."""
        error = self._device_errors.poll_and_wait()
        found = [bool(error[0]), self._flag is not None and self._flag.is_raised()]
        failed, bad = self._checks.agree(found, "the last update")
        if failed:
            self._guarded(lambda updates: self._device_errors.refuse(error, self.steps + 1))
        if bad:
            self._guarded(lambda updates: self._raise_state(self.steps))

    def _raise_state(self, step: int) -> None:
        if self._flag is not None:
            self._flag.lower()
        raise self._errors.state(step, self.stepper)

    def end(self, skipped: bool, loss: float | None, seconds: float) -> StepEnd:
        """Return the event of the step that ended. Its norm is set only if the host knows it."""
        return StepEnd(
            step=self.steps,
            loss=loss,
            grad_norm=None if self._launched else self.grad_norm,
            lr=tuple(float(group["lr"]) for group in self.groups),
            skipped=skipped,
            loss_scale=self.scaler.scale if self.scales_loss else 1.0,
            seconds=seconds,
            rolled_back=self.updates is not None and self.updates.rolled_back,
        )
