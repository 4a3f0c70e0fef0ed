"""Updates inside backward: each unit's as soon as its gradients are reduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zero_ext.comm import Collectives
from zero_ext.optim import Stepper, Update
from zero_ext.zero.gradients.accumulator import UnitGradients
from zero_ext.zero.step.update_schedule import MIXTURE, UpdatesAfterBackward, publish, settings_of
from zero_ext.zero.units.collective_errors import raise_on_all_ranks
from zero_ext.zero.units.master_weights import MasterShard, follow_writes
from zero_ext.zero.units.unit import Unit

_INSTEAD = "set offload.update_mode to 'after_backward'"


class UpdatesInBackward(UpdatesAfterBackward):
    """The updates of a step run while its last backward pass goes on.

    A unit is updated when its reduction is finished and every trainable parameter of it has brought its
    gradient on this rank; units for which that never holds are updated by :meth:`run`. So ranks may differ in
    when, never in what. Without ``on_trial`` a unit's gradient is used up by its update. With it the update
    assumes that gradients will be neither clipped nor skipped, and :meth:`run` or :meth:`rollback` restores
    the state exactly if they are (SuperOffload, arXiv 2509.21271). Parameters reach other ranks in ``run``.
    """

    clears = True
    obeys_scale = False

    def __init__(
        self,
        stepper: Stepper,
        masters: Sequence[MasterShard],
        gradients: Mapping[Unit, UnitGradients],
        collectives: Collectives,
        groups: list[dict[str, Any]],
        on_trial: bool,
    ) -> None:
        super().__init__(stepper, masters, gradients, collectives)
        self._groups = groups
        self._on_trial = on_trial
        self._number_of = {each: number for number, each in enumerate(self._gradients)}
        self._last = False  # whether the latest pass ends the accumulation
        self._scale = torch.ones((), device="cpu")
        self._settings: list[dict[str, Any]] = []
        self._early: dict[int, frozenset[str]] = {}  # the parameters updated in backward, by range
        self._error: Exception | None = None  # why the step cannot be finished
        self._stale: str | None = None  # a parameter that was read after its update

    def begin_backward(self, last: bool, scale: torch.Tensor) -> None:
        """See :class:`UpdateSchedule`. Raises ``RuntimeError`` if the step of the pass before is still
        due."""
        if self.pending:
            raise RuntimeError(
                "backward: expected optimizer.step() before it, as offload.update_mode is "
                "'in_backward' and the updates of the last pass are under way, got a further pass. "
                "For several passes a step, set batch.gradient_accumulation_steps to their number, "
                f"run all but the last inside 'with model.no_sync():', or {_INSTEAD}."
            )
        self._last, self._scale = last, scale
        self._settings = settings_of(self._groups)
        if last:
            # An update would overwrite what the user has written to parameters since the last step.
            follow_writes(self._masters, self._collectives)

    @property
    def updated(self) -> bool:
        """See :class:`UpdateSchedule`."""
        return bool(self._early) and not self._on_trial

    def refuse_pending(self, what: str) -> None:
        """See :class:`UpdateSchedule`."""
        if self.pending:
            raise RuntimeError(
                f"{what}: expected optimizer.step() before it, as offload.update_mode is "
                "'in_backward', some units are updated and gradients are used up. Call "
                "optimizer.step() first. To clip, set gradient_clipping. To read or change "
                f"gradients, {_INSTEAD}."
            )

    def gradient_arrived(self, gradients: UnitGradients) -> None:
        """See :class:`UpdateSchedule`."""
        self.pending = self.pending or self._last
        if self._last and (self._number_of[gradients] in self._early or gradients.reducing):
            self._refuse_late(gradients)

    def reduced(self, gradients: UnitGradients) -> None:
        """See :class:`UpdateSchedule`: updates the unit if its gradients are all there."""
        number = self._number_of[gradients]
        if number in self._early:
            self._refuse_late(gradients)
        elif self._last and self._error is None and gradients.contributed and gradients.complete:
            self._update(number, gradients)

    def _update(self, number: int, gradients: UnitGradients) -> None:
        specs = gradients.unit.layout.specs
        # First, so that a rollback covers an update that broke off.
        self._early[number] = frozenset(specs[index].name for index in gradients.contributed)
        try:
            with torch.no_grad():
                gradients.finish()
                if self._on_trial:
                    self._stepper.snapshot(number)
                update = Update(number, gradients.for_optimizer())
                list(self._stepper.step([update], self._scale, self._early[number]))
        # ``run`` raises the error on all ranks. Here the others would wait for this rank in a collective.
        except Exception as error:
            self._error = error
        # Autograd then refuses values that it saved before the update.
        gradients.unit.forbid_saved(gradients.contributed)
        if not self._on_trial:
            gradients.use_up()

    def _refuse_late(self, gradients: UnitGradients) -> None:
        self._error = self._error or RuntimeError(
            f"{gradients.unit.describe()}: expected no gradient after its update inside backward, "
            "got one: a parameter is used again by a later part of the pass, as reentrant "
            f"checkpointing does with shared layers. To update later, {_INSTEAD}."
        )

    def read(self, gradients: UnitGradients, index: int) -> None:
        """See :class:`UpdateSchedule`: a value from after the update would go into other gradients."""
        name = gradients.unit.layout.specs[index].name
        if name in self._early.get(self._number_of[gradients], ()):
            self._stale = self._stale or name

    def run(self, scale: torch.Tensor, used: frozenset[str]) -> None:
        """See :class:`UpdateSchedule`. Agree on the updates in backward, commit or roll back trial
        updates, make the remaining ones and publish parameters."""
        # All ranks have the same scales, so either all of them roll back or none.
        self.rolled_back = self._on_trial and bool(self._early) and not torch.equal(scale, self._scale)
        self.rolled_back_steps += self.rolled_back
        self.committed_steps += self._on_trial and bool(self._early) and not self.rolled_back
        try:
            raise_on_all_ranks(
                self._collectives, lambda: self._finish(scale, used), "the optimizer step", MIXTURE
            )
        finally:
            self.drop()
        publish(gradients.unit for gradients in self._gradients if gradients.contributed)

    def _finish(self, scale: torch.Tensor, used: frozenset[str]) -> None:
        if self._error is not None:
            raise self._error
        if self._stale is not None:
            raise RuntimeError(
                f"parameter '{self._stale}': expected no read after its update inside backward, got "
                "one: activation checkpointing runs a part of the model again that uses it detached, "
                f"or a hook reads it. To update later, {_INSTEAD}."
            )
        if self._early:
            _refuse_changes(self._settings, settings_of(self._groups))
        for number, names in self._early.items():
            specs = self._gradients[number].unit.layout.specs
            missed = sorted(used.intersection(spec.name for spec in specs) - names)
            if missed:
                raise RuntimeError(
                    f"parameter '{missed[0]}': expected its gradient before the update of its unit, got "
                    "it after: it was frozen during an accumulation, or on some ranks. To update later, "
                    f"{_INSTEAD}."
                )
        if self._on_trial:
            for number in self._early:
                (self._stepper.rollback if self.rolled_back else self._stepper.commit)(number)
            if self.rolled_back and self.flag is not None:
                self.flag.lower()
        # Updates that were rolled back are made again, with the scale of the step.
        done = () if self.rolled_back else self._early
        list(self._stepper.step(self._updates(done), scale, used))

    def rollback(self) -> None:
        """See :class:`UpdateSchedule`."""
        self.rolled_back = bool(self._early)
        self.rolled_back_steps += self.rolled_back
        try:
            raise_on_all_ranks(
                self._collectives, self._undo, "rolling back the updates made in backward", MIXTURE
            )
        finally:
            self.drop()

    def _undo(self) -> None:
        for number in self._early:
            self._stepper.rollback(number)
            # Rounding the masters again restores the parameters bit for bit, so no copy of them was made.
            self._masters[number].write_params()
        if self.flag is not None:
            self.flag.lower()

    def forget(self) -> str | None:
        """See :class:`UpdateSchedule`. Raise ``RuntimeError`` if updates cannot be rolled back."""
        if self._early and not self._on_trial:
            raise RuntimeError(
                "clearing gradients: expected optimizer.step() before it, as offload.update_mode is "
                f"'in_backward' and updates were made. Call optimizer.step() first, or {_INSTEAD}."
            )
        return self.abandon()

    def abandon(self) -> str | None:
        """See :class:`UpdateSchedule`."""
        try:
            if self._early and not self._on_trial:
                return (
                    "a backward pass broke off after some units were updated in it. Load the last checkpoint"
                )
            try:
                self._undo()
            except Exception as error:
                return f"updates made in backward could not be rolled back: {error}"
            return None
        finally:
            self.drop()

    def drop(self) -> None:
        """See :class:`UpdateSchedule`."""
        if self._on_trial:
            for number in self._early:
                self._stepper.commit(number)
        self._early = {}
        self._error = self._stale = None
        self._last = self.pending = False


def _refuse_changes(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> None:
    for number, (old, new) in enumerate(zip(before, now, strict=True)):
        changed = [key for key in new if key not in old or bool(old[key] != new[key])]
        if changed:
            raise RuntimeError(
                f"param group {number}, '{changed[0]}': expected the value of the updates made in "
                f"backward, {old.get(changed[0])!r}, got {new[changed[0]]!r} before optimizer.step(). "
                f"Change it after optimizer.step(), as schedulers do, or {_INSTEAD}."
            )
