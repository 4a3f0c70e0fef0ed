"""The optimizer step: the factor of the gradients, overflow, the update, and what is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zero_ext.comm import Collectives
from zero_ext.config import ZeroConfig
from zero_ext.config.config_errors import clause_of
from zero_ext.config.events import StepEnd
from zero_ext.config.full_tensor_costs import newton_schulz_cost
from zero_ext.offload import TierManager
from zero_ext.optim import OwnedRange, Stepper, Total
from zero_ext.optim.one_bit_steppers import OneBitStepper
from zero_ext.optim.optimizer_registry import steps_full_tensors
from zero_ext.optim.stepper import NonFiniteFlag, TensorExchange
from zero_ext.zero.construction.rank_consistency import Hyperparameters
from zero_ext.zero.gradients.accumulator import UnitGradients
from zero_ext.zero.gradients.gradient_norms import GradientNorms
from zero_ext.zero.gradients.reducer import Edits
from zero_ext.zero.step.loss_scaler import LossScaler
from zero_ext.zero.step.onebit_updates import OneBitUpdates
from zero_ext.zero.step.overlapped_updates import DelayedUpdates, UpdatesInBackward
from zero_ext.zero.step.owner_exchange import OwnerExchange
from zero_ext.zero.step.sliced_tensors import full_shape, sliced_tensors
from zero_ext.zero.step.step_errors import DeviceErrors, FiniteChecks, StepErrors
from zero_ext.zero.step.step_verdict import (
    DecidedStep,
    LaunchedSteps,
    OwnFacts,
    Verdict,
    gradient_scale,
    sum_of_ranks,
)
from zero_ext.zero.step.stepped_experts import SteppedExperts
from zero_ext.zero.step.update_schedule import (
    MIXTURE,
    UpdateInputs,
    UpdatesAfterBackward,
    UpdateSchedule,
    any_stored,
    settings_of,
)
from zero_ext.zero.tiling import FullTensorMap
from zero_ext.zero.units.collective_errors import CollectiveError, raise_on_all_ranks
from zero_ext.zero.units.flat_layout import ParameterSpec
from zero_ext.zero.units.master_weights import MasterShard
from zero_ext.zero.units.unit import Unit

Groups = list[dict[str, Any]]


def _cost(spec: ParameterSpec) -> int:
    return newton_schulz_cost(spec.shape) if len(spec.shape) >= 2 else spec.numel


def _among(collectives: Collectives, group: Collectives | None) -> Collectives | None:
    """Return ``collectives``, or those of the ranks of ``group`` alone. None stays None."""
    if group is None or group.ranks == collectives.ranks:
        return group and collectives
    return collectives.among([collectives.ranks.index(rank) for rank in group.ranks])


class OptimizerStep:
    """Steps the master shards by their reduced gradients and keeps count.

    ``updates`` decides when the updates run. ``steps`` counts all steps, those
    skipped for overflow too; ``damage`` says why the state is a mixture, until a checkpoint is loaded.

    Where state, gradients and parameters are in an accelerator's memory, kernels obey a step's verdict
    before the host reads it. If it is bad, that step and all that were launched since change nothing. The
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
        experts: SteppedExperts,
    ) -> None:
        self._masters = tuple(masters)
        self._gradients = [gradients[master.unit] for master in masters]
        self._norms, self._collectives, self._tiers, self.experts = norms, collectives, tiers, experts
        # Of the ranks that wait for one another in an update. An error on one of them is raised on all.
        self._updating = collectives.slices or collectives
        # Delayed updates send matrices from a thread of their own, over connections of their own.
        self._stepping = self._updating
        self._clipping = config.gradient_clipping
        self._when = config.offload.update_mode
        self._delays_after = config.offload.delay_start_step
        self._checks = FiniteChecks(self._masters, self._gradients, collectives)
        self._flag = NonFiniteFlag() if config.check_finite else None
        self._errors = StepErrors(collectives, self._checks)
        self._device_errors = DeviceErrors(collectives, tiers.device)
        self._last_pass = False
        self.scaler = LossScaler(config.loss_scale)
        self.scales_loss = scales_loss
        self.stepper: Stepper | None = None
        self._exchange: OwnerExchange | None = None
        self.updates = UpdateSchedule()
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
        make: Callable[[Sequence[OwnedRange], Groups, Total, TensorExchange | None], Stepper],
        full_tensors: FullTensorMap,
        exchanges: bool,
    ) -> None:
        """Create the stepper with ``make`` and its update schedule. ``groups`` are the user's live param
        groups with the settings ``names``. A stepper that ``exchanges`` needs ``full_tensors``."""
        group_of = {parameter: number for number, group in enumerate(groups) for parameter in group["params"]}
        for master in self._masters:
            master.set_groups(group_of, partial(full_shape, full_tensors))
        self.groups = groups
        self._hyperparameters = Hyperparameters(groups, names)
        settings = settings_of(groups) if self._when == "delayed" else groups
        if exchanges:
            owned = [each for each in self._masters if steps_full_tensors(each.unit.spec.rule)]
            found = sliced_tensors(owned, full_tensors, self._collectives)
            if self._when == "delayed":
                self._stepping = self._updating.reconnected()
                found = {_among(self._stepping, group): tensors for group, tensors in found.items()}
            self._exchange = OwnerExchange(found, _cost, in_host_memory=self._when == "delayed")
        self.stepper = make(self._masters, settings, self._total, self._exchange)
        if self._flag is not None:
            self.stepper.watch(self._flag)
        inputs = UpdateInputs(self.stepper, self._masters, self._gradients, self._updating, self.experts)
        if self._when == "in_backward":
            on_trial = bool(self._clipping) or self.scales_loss
            self.updates = UpdatesInBackward(inputs, groups, on_trial)
        elif isinstance(self.stepper, OneBitStepper):
            self.updates = OneBitUpdates(inputs, self.stepper, lambda: self.steps - self.skipped_steps)
        elif self._when == "delayed":
            self.updates = DelayedUpdates(inputs, groups, settings, self._tiers)
        else:
            self.updates = UpdatesAfterBackward(inputs)
        self.updates.flag = self._flag

    def _total(self, own: Callable[[], torch.Tensor], fallible: bool = False) -> torch.Tensor:
        stored = fallible or any_stored(self._masters, self._gradients)
        what, advice = (
            ("the optimizer's own code", MIXTURE) if fallible else ("reading the state for a step", "")
        )
        values = raise_on_all_ranks(self._stepping, own, what, advice, stored=stored)
        sharded = any(master.unit.placement.optimizer for master in self._masters)
        if not (sharded and values.numel()):
            return values
        return self._collectives.sum_(values, "norms of the optimizer")

    def wait(self) -> None:
        """Return when no update runs and counts are those of the steps made; raises what failed here."""
        self.updates.wait()
        self._look(wait=True)

    def finish(self) -> None:
        """Make the parameters follow the updates of the last step; a collective."""
        if self.updates.in_progress:
            self._guarded(self.updates.finish)
            if self._stepping is not self._updating:
                self._collectives.traffic.move_from(self._stepping.traffic)
            self._guarded(lambda: self._refuse_state(self.steps))

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
        """:attr:`grad_norm_tensor`, None if the host has read it."""
        return self.grad_norm_tensor if self._launched else None

    def has_failed_step(self) -> bool:
        """Return whether this rank has read, without waiting, that an earlier step was not made."""
        self._look(wait=False)
        return self._launched.seen_bad

    def notify_failed_step(self, bad: bool) -> None:
        """Store whether an earlier step was not made on any rank. The next step raises the error."""
        self._known_to_all = bad

    def judge(self) -> None:
        """Wait for the verdicts on all steps so far. A collective. Raises on all ranks why a step was not
        made, if one was not: ``FloatingPointError`` for gradients, weights or moments that are not finite,
        ``RuntimeError`` for anything else."""
        if not self._unjudged:
            return
        self._unjudged = False
        self._known_to_all = False
        self._look(wait=True)
        bad = self._launched.pop_bad()
        if bad is not None:
            self._refuse(bad, late=True)
        if self.updates.in_progress:
            return
        error = self._device_errors.poll_and_wait()
        found = [bool(error[0]), self._flag is not None and self._flag.is_raised()]
        failed, not_finite = self._checks.agree(found, "the last update")
        if failed:
            self._guarded(lambda: self._device_errors.refuse(error, self.steps + 1))
        if not_finite:
            self._guarded(lambda: self._raise_state(self.steps))

    def _look(self, wait: bool) -> None:
        if (bad := self._launched.look(wait)) is not None:
            self._undo_counts(bad)

    def _undo_counts(self, step: DecidedStep) -> None:
        if self.stepper is not None:
            self.stepper.load_scalars(step.scalars)
        self.steps = step.number - 1

    @property
    def _waits_for_flag(self) -> bool:
        """Return whether the host reads the flag of an update later than in its step."""
        return self._flag is not None and self._tiers.device.is_accelerator

    @property
    def _judges_on_device(self) -> bool:
        """Return whether kernels obey the verdict on a step before the host reads it."""
        return (
            self.stepper is not None
            and self.updates.obeys_scale
            and self.stepper.reads_scale_on_device
            and self._collectives.model is None
            and self._norms.on_device
        )

    def _decide(self, edits: Edits) -> DecidedStep:
        """Add up over the ranks what decides on the step; a collective."""
        needs_norm = bool(self._clipping or self.scales_loss) and not self.updates.needs_local_gradients
        found = self._looks_at_gradients and self._norms.read_on_all_ranks(
            lambda: not self._checks.gradients_are_finite()
        )
        # The flag of a delayed update is read by ``finish``, when its thread has ended.
        flag = self._flag if self._waits_for_flag and not self.updates.in_progress else None
        raised = flag is not None and flag.is_raised_on(torch.device("cpu"))
        # From 1 on, because ``Verdict`` takes ranks that send zeros for simulated ones.
        checksums = self._hyperparameters.checksum(), 1 + edits.checksum
        facts = OwnFacts(*checksums, bool(found), raised, self.updates.updated)
        error = self._device_errors.poll()
        squares = self._norms.own() if needs_norm else None
        sums = sum_of_ranks(self._collectives, self._tiers.device, facts, squares, flag, error)
        verdict = Verdict(sums, self._collectives.world_size, self._unscale(), error)
        scalars = self.stepper.scalars() if self.stepper is not None else {}
        return DecidedStep(self.steps + 1, verdict, squares, edits.last, scalars)

    def begin_backward(self, last: bool) -> None:
        """Begin a backward pass; ``last`` says that it is the last of its step."""
        self._last_pass = last
        self.updates.begin_backward(last, self._unscale())

    def reduced(self, gradients: UnitGradients) -> None:
        """Handle a finished reduction of this unit. Only finite gradients start an update."""
        # Later the step checks gradients that are still in transfer: the host would wait for the device here.
        waits = gradients.storage.is_async and self._when != "in_backward"
        looks = self._last_pass and self._looks_at_gradients and not waits
        self.updates.reduced(gradients, not looks or self._checks.look_at(gradients))

    @property
    def _looks_at_gradients(self) -> bool:
        """Return whether gradients are looked at themselves: their norm, where there is one, shows it too."""
        normed = self._clipping or self.scales_loss or self.updates.needs_local_gradients
        return self._flag is not None and self.stepper is not None and not normed

    def forget_gradients(self) -> None:
        """Note that the gradients are cleared. ``RuntimeError`` if a step in backward has used them."""
        self.damage = self.updates.forget() or self.damage
        self.experts.clear()

    def forget_experts(self) -> None:
        """Note that the gradients are zeros, so that a step updates no experts until they are reached."""
        self.experts.clear()
        for gradients in self._gradients:
            gradients.assigned.clear()

    def abandon(self) -> None:
        """Note that a backward pass broke off."""
        self.damage = self.updates.abandon() or self.damage

    def forget_damage(self) -> None:
        """State and parameters were replaced."""
        self.damage = None
        self._launched.clear()
        self._verdict = None
        self._known_to_all = False
        # An error of the state that was replaced is no error of the next step.
        self._device_errors.poll()
        if self._flag is not None:
            self._flag.lower()
        self.updates.drop()

    def refuse_damage(self) -> None:
        """Raise ``RuntimeError`` if an earlier step broke off half-way."""
        if self.damage is not None:
            raise RuntimeError(
                f"prepared model: its state is damaged: {clause_of(self.damage)}. Load a checkpoint, which "
                "replaces all of it."
            )

    def run(self, edits: Edits) -> bool:
        """Step with synchronized gradients, which ``edits`` changed in place; a collective. Return False
        if fp16 gradients overflowed. Raise ``RuntimeError`` if no rank has a gradient since the last step."""
        used = self.updates.used_parameters()
        if self._exchange is not None:
            self._exchange.check_used(used)
        if self._known_to_all:
            # The agreement on gradients has brought this to all ranks, so all of them raise here.
            self.judge()
        step = self._decide(edits)
        self._verdict = None if self.updates.needs_local_gradients else step.verdict
        overflow = (self._launch if self._judges_on_device else self._run_judged)(step, used)
        # Immediately after the update, before other engines and later kernels record errors.
        self._device_errors.claim()
        self.skipped_steps += overflow
        self.steps += 1
        self._unjudged = self._tiers.device.is_accelerator
        self._collectives.traffic.begin_step()
        self._tiers.transfers.begin_step()
        return not overflow

    def _launch(self, step: DecidedStep, used: frozenset[str]) -> bool:
        """Give the device a step that it makes if the verdict is good; then wait whether fp16 overflowed."""
        scale = step.verdict.scale(self._clipping)
        if self.scales_loss:
            # The scale and the count of skipped steps depend on the verdict. It is
            # read after the launch, so that the device has work meanwhile.
            self._guarded(lambda: self.updates.run(scale, used))
            findings = step.verdict.read()
            if findings.refused or findings.overflow:
                self._undo_counts(step)
            if findings.refused:
                self._refuse(step)
            self.scaler.update(findings.overflow, self._name_overflow)
            return findings.overflow
        scale = self._launched.add(step, scale)
        self._guarded(lambda: self.updates.run(scale, used))
        return False

    def _run_judged(self, step: DecidedStep, used: frozenset[str]) -> bool:
        """Make a step after the host has read its verdict. Return whether fp16 gradients overflowed."""
        findings = step.verdict.read()
        if findings.refused or (findings.overflow and not self.scales_loss):
            self._refuse(step)
        overflow, looks = findings.overflow, self._flag is not None or self.scales_loss
        if not overflow and looks and self.updates.needs_local_gradients:
            ranks = self.updates.not_finite()
            if ranks and not self.scales_loss:
                raise self._errors.gradients(self.steps + 1, f" on ranks {ranks}", local=True)
            overflow = bool(ranks)
        if findings.overflow:
            self._guarded(self.updates.rollback)
        elif not (overflow or findings.updated):
            self._read_settings()
        scale = gradient_scale(self._unscale(), findings.norm, self._clipping)
        # A delayed update of the step before uses the copies of gradients that ``run`` overwrites.
        self.finish()
        if not overflow:
            self._guarded(lambda: self.updates.run(scale, used))
        if self.scales_loss:
            # Last, because ``run`` refuses settings and the step is then made again.
            self.scaler.update(overflow, self._name_overflow)
        if overflow:
            return True
        if self.steps < self._delays_after:
            self.finish()
        if not (self._waits_for_flag or self.updates.in_progress):
            self._guarded(lambda: self._refuse_state(self.steps + 1))
        return False

    def _read_settings(self) -> None:
        """Let the stepper read its settings, the same on all ranks. If it refuses them, undo updates
        on trial, so that nothing is stepped."""
        if self.stepper is not None:
            try:
                self.updates.read_settings()
            except ValueError:
                self._guarded(self.updates.rollback)
                raise

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except CollectiveError as error:
            self.damage = str(error)
            raise
        except Exception:
            self.damage = MIXTURE if self.updates.broke_off else self.damage
            raise

    def _unscale(self) -> torch.Tensor:
        factor = torch.tensor(self.factor, dtype=torch.float32, device="cpu")
        return factor / self.scaler.scale if self.scales_loss else factor

    def _refuse(self, step: DecidedStep, late: bool = False) -> None:
        """Raise why ``step`` was not made; a collective. ``late`` says that others were launched since."""
        findings = step.verdict.read()
        # First, because the other findings may follow from what the kernel left.
        if findings.device_error:
            own = step.verdict.read_error()
            self._guarded(lambda: self._device_errors.refuse(own, step.number, late))
        if findings.edits_differ:
            raise self._errors.edits(step.edited, late)
        if findings.settings_differ:
            self.damage = MIXTURE if findings.updated else self.damage
            self._errors.raise_settings(step.number, self._hyperparameters, mixed=findings.updated, late=late)
        if findings.weights:
            self._guarded(lambda: self._raise_state(step.number - 1))
        if not findings.updated:
            self._guarded(self.updates.rollback)
        error = self._errors.gradients(
            step.number,
            "" if findings.norm is None else f" (their norm is {findings.norm})",
            local=self.updates.needs_local_gradients,
            mixed=findings.updated,
            known=step.non_finite() if late else None,
            late=late,
        )
        if findings.updated:
            self.damage = str(error)
            self._guarded(self.updates.drop)
        raise error

    def _name_overflow(self) -> str:
        return self._errors.overflow(self.updates.needs_local_gradients)

    def _refuse_state(self, step: int) -> None:
        """Raise :class:`NonFiniteState` on all ranks if the update of ``step`` left NaN or infinity."""
        if self._flag is not None and self._checks.agree([self._flag.is_raised()], "finite weights")[0]:
            self._raise_state(step)

    def _raise_state(self, step: int) -> None:
        if self._flag is not None:
            self._flag.lower()
        raise self._errors.state(step, self.stepper)

    def end(self, skipped: bool, loss: float | None, seconds: float) -> StepEnd:
        """Return the event of the step that ended. Its norm is set only if the host has read it."""
        return StepEnd(
            step=self.steps,
            loss=loss,
            grad_norm=None if self._launched else self.grad_norm,
            # None: the optimizer computes its own for each parameter.
            lr=tuple(float("nan" if group["lr"] is None else group["lr"]) for group in self.groups),
            skipped=skipped,
            loss_scale=self.scaler.scale if self.scales_loss else 1.0,
            seconds=seconds,
            rolled_back=self.updates.rolled_back,
        )
