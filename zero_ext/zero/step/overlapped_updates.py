"""Updates that overlap: inside backward, or alongside the next step's forward and backward."""

from __future__ import annotations

import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from zero_ext.config.events import Bus
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.config.tiers import TIERS, Tier, is_stored
from zero_ext.offload import Device, MemoryShard, ShardStorage, TierManager
from zero_ext.optim import Stepper, Update
from zero_ext.optim.stepper import ElementRanges
from zero_ext.zero.gradients.accumulator import UnitGradients
from zero_ext.zero.step.update_schedule import (
    MIXTURE,
    UpdateInputs,
    UpdatesAfterBackward,
    publish,
    settings_of,
)
from zero_ext.zero.units.collective_errors import CollectiveError, raise_on_all_ranks
from zero_ext.zero.units.master_weights import follow_writes

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

    def __init__(self, inputs: UpdateInputs, groups: list[dict[str, Any]], on_trial: bool) -> None:
        super().__init__(inputs)
        self._groups, self._on_trial = groups, on_trial
        self._number_of = {each: number for number, each in enumerate(self._gradients)}
        self._last = False  # whether the latest pass ends the accumulation
        self._reads = True  # whether the stepper could read its settings. Else ``run`` makes all updates
        self._scale = torch.ones((), device="cpu")
        self._settings: list[dict[str, Any]] = []
        self._early: dict[int, frozenset[str]] = {}  # the parameters updated in backward, by range
        self._error: Exception | None = None  # why the step cannot be finished
        self._stale: str | None = None  # a parameter that was read after its update

    def begin_backward(self, last: bool, scale: torch.Tensor) -> None:
        """Raise ``RuntimeError`` if the step of the pass before is still due."""
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
            self._reads = self._has_read_settings()

    def _has_read_settings(self) -> bool:
        try:
            self._stepper.read_settings()
        except ValueError:  # raised by the step, on all ranks
            return False
        return True

    @property
    def updated(self) -> bool:
        return bool(self._early) and not self._on_trial

    def refuse_pending(self, what: str) -> None:
        if self.pending:
            raise RuntimeError(
                f"{what}: expected optimizer.step() before it, as offload.update_mode is 'in_backward', some "
                "units are updated and gradients are used up. Call optimizer.step() first. To clip, set "
                f"gradient_clipping. To read or change gradients, {_INSTEAD}."
            )

    def gradient_arrived(self, gradients: UnitGradients) -> None:
        self.pending = self.pending or self._last
        if self._last and (self._number_of[gradients] in self._early or gradients.reducing):
            self._refuse_late(gradients)

    def reduced(self, gradients: UnitGradients, finite: bool) -> None:
        """Update the unit if its gradients are all there."""
        number = self._number_of[gradients]
        late = number in self._early
        if late and finite:
            self._refuse_late(gradients)
        ready = self._last and self._reads and finite and not late and self._error is None
        ready = ready and bool(gradients.contributed) and gradients.complete
        if self._last and self._stepper.is_collective(number):
            self._update_on_all_ranks(number, gradients, ready)
        elif ready:
            self._update(number, gradients)

    @torch.no_grad()
    def _update_on_all_ranks(self, number: int, gradients: UnitGradients, ready: bool) -> None:
        """Update a unit if all ranks are ready to update the same parameters of it, else leave it to
        :meth:`run`. A collective, as reductions end in one order on all ranks."""
        update = self._prepared(number, gradients) if ready else None
        ready = update is not None
        flags = torch.zeros(self._collectives.world_size, dtype=torch.int64, device="cpu")
        names = repr(sorted(gradients.contributed)).encode()
        flags[self._collectives.rank] = 1 + zlib.crc32(names) if ready else 0
        self._collectives.sum_(flags, f"agreement on the update of {gradients.unit.name}")
        if update is not None and bool(flags.eq(flags[0]).all()):
            self._make(update, gradients)
        elif ready:
            if self._on_trial:
                self._stepper.rollback(number)
            del self._early[number]

    @torch.no_grad()
    def _update(self, number: int, gradients: UnitGradients) -> None:
        self._make(self._prepared(number, gradients), gradients)

    @torch.no_grad()
    def _prepared(self, number: int, gradients: UnitGradients) -> Update | None:
        """Return the update of a unit, None after an error, which :meth:`run` raises."""
        specs = gradients.unit.layout.specs
        # First, so that a rollback covers an update that broke off.
        self._early[number] = frozenset(specs[index].name for index in gradients.contributed)
        try:
            gradients.finish()
            if self._on_trial:
                self._stepper.snapshot(number)
            return self._update_of(number, gradients)
        except Exception as error:
            self._error = error
            return None

    def _make(self, update: Update | None, gradients: UnitGradients) -> None:
        if update is not None:
            try:
                list(self._stepper.step([update], self._scale, self._early[update.index]))
            # ``run`` raises the error on all ranks. Here the others would wait for this rank in a collective.
            except Exception as error:
                self._error = error
        # Autograd then refuses values that it saved before the update.
        gradients.unit.forbid_saved(gradients.contributed)
        if not self._on_trial:
            gradients.storage.forget()  # the update was its only reader

    def _refuse_late(self, gradients: UnitGradients) -> None:
        self._error = self._error or RuntimeError(
            f"{gradients.unit.describe()}: expected no gradient after its update inside backward, "
            "got one: a parameter is used again by a later part of the pass, as reentrant "
            f"checkpointing does with shared layers. To update later, {_INSTEAD}."
        )

    def read(self, gradients: UnitGradients, index: int) -> None:
        """Note a read of a value from after the update, which would go into other gradients."""
        name = gradients.unit.layout.specs[index].name
        if name in self._early.get(self._number_of[gradients], ()):
            self._stale = self._stale or name

    def run(self, scale: torch.Tensor, used: frozenset[str]) -> None:
        """Agree on the updates in backward, commit or roll back trial ones, make the others and publish."""
        # All ranks have the same scales, so either all of them roll back or none.
        self.rolled_back = self._on_trial and bool(self._early) and not torch.equal(scale, self._scale)
        self.rolled_back_steps += self.rolled_back
        self.committed_steps += self._on_trial and bool(self._early) and not self.rolled_back
        try:
            if any(self._stepper.is_collective(number) for number in range(len(self._masters))):
                # Before the step, in which the others would wait for a rank that has failed.
                self._on_all_ranks(lambda: self._check_updates(used))
                self._on_all_ranks(lambda: self._update_others(scale, used))
            else:

                def both() -> None:
                    self._check_updates(used)
                    self._update_others(scale, used)

                self._on_all_ranks(both)
        finally:
            self.drop()
        publish(gradients.unit for gradients in self._gradients if gradients.contributed)

    def _on_all_ranks(self, action: Callable[[], object]) -> None:
        raise_on_all_ranks(self._collectives, action, "the optimizer step", MIXTURE)

    def _check_updates(self, used: frozenset[str]) -> None:
        """Check the updates in backward, and commit trial ones or roll them back."""
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

    def _update_others(self, scale: torch.Tensor, used: frozenset[str]) -> None:
        # Updates that were rolled back are made again, with the scale of the step.
        done = () if self.rolled_back else self._early
        list(self._stepper.step(self._updates(done), scale, used))

    def rollback(self) -> None:
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
        """Raise ``RuntimeError`` if updates cannot be rolled back."""
        if self._early and not self._on_trial:
            raise RuntimeError(
                "clearing gradients: expected optimizer.step() before it, as offload.update_mode is "
                f"'in_backward' and updates were made. Call optimizer.step() first, or {_INSTEAD}."
            )
        return self.abandon()

    def abandon(self) -> str | None:
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


_UNCHANGED = (
    "No parameter or optimizer state was changed. Call optimizer.zero_grad() and repeat forward and backward."
)


class DelayedUpdates(UpdatesAfterBackward):
    """The updates of a step run on a thread of their own until the next step, or until state is read (the
    one-step delayed parameter update of ZeRO-Offload, Ren et al., arXiv 2101.06840).

    Forward and backward in between use the parameters from before them: the thread changes master weights and
    the optimizer's state alone, from copies of the gradients (in the host's memory, as many bytes as a rank's
    part of them) and of the hyper-parameters: the stepper reads ``settings``, which :meth:`run` copies from
    the live ``groups``. :meth:`finish` makes the parameters follow, see :meth:`MasterShard.publish`.
    """

    obeys_scale = False

    def __init__(
        self,
        inputs: UpdateInputs,
        groups: Sequence[dict[str, Any]],
        settings: Sequence[dict[str, Any]],
        tiers: TierManager,
    ) -> None:
        super().__init__(inputs)
        self._groups, self._settings, self._tiers = groups, settings, tiers
        self._copies: dict[int, torch.Tensor] = {}  # copies of gradients, by number of the master
        self._job: _Job | None = None
        self._used: frozenset[str] = frozenset()
        self._ranges: dict[int, ElementRanges | None] = {}  # of the job's updates
        self._joining: weakref.finalize[Any, Any] | None = None

    def read_settings(self) -> None:
        """Do nothing: :meth:`run` reads them, when no update uses those of the step before."""

    def run(self, scale: torch.Tensor, used: frozenset[str]) -> None:
        """See :class:`UpdateSchedule`. Copy the gradients. The updates start in :meth:`begin_delayed`,
        or at the latest in :meth:`finish`."""
        if self._job is not None:
            raise zero_ext_bug("the updates of a step before were not finished")
        for copied, live in zip(self._settings, settings_of(self._groups), strict=True):
            # In place, because the stepper holds these dictionaries.
            copied.clear()
            copied.update(live)
        self._stepper.read_settings()
        updates = self._copy_gradients()
        # The call must not refer to this object, or the object would outlive the model.
        self._job = _Job(_step_of(self._stepper, updates, scale, used, self._tiers.device), self._tiers.bus)
        self._used, self._ranges = used, {update.index: update.ranges for update in updates}
        self.in_progress = True

    def begin_delayed(self) -> None:
        if self._job is not None:
            self._job.start()
            # A model that goes takes its storage and memory along, so the thread has to end first.
            self._joining = weakref.finalize(self, self._job.join)

    def wait(self) -> None:
        if self._job is not None:
            self._job.result()

    def finish(self) -> None:
        job = self._job
        if job is None:
            return

        def complete() -> list[int]:
            numbers = job.result()
            for number in numbers:
                self._masters[number].publish(self._used, self._ranges[number])
            return numbers

        try:
            numbers = raise_on_all_ranks(self._collectives, complete, "the optimizer step", MIXTURE)
        except CollectiveError:
            self._forget()
            raise
        self._forget()
        units = [self._masters[number].unit for number in numbers]
        for unit in units:
            unit.forbid_saved(range(len(unit.parameters)))
        publish(units)

    def allocated_bytes(self) -> Mapping[Tier, int]:
        """Return the bytes of the copies of the gradients."""
        held: Counter[Tier] = Counter()
        for number, copy in self._copies.items():
            held[self._near(number)] += copy.nbytes
        return held

    def _near(self, number: int) -> Tier:
        return TIERS[self._masters[number].state.tier].near

    def _copy_gradients(self) -> list[Update]:
        """Return updates that read copies of the gradients. A collective where gradients are on NVMe.
        ``RuntimeError``: a copy failed on some rank. It is raised on all ranks, before anything changed."""

        stored = is_stored(*(gradients.storage.tier for gradients in self._gradients))
        try:
            return raise_on_all_ranks(
                self._collectives,
                lambda: [replace(each, gradient=self._copy(each)) for each in self._updates()],
                "reading gradients for the optimizer step",
                _UNCHANGED,
                stored,
            )
        except CollectiveError as error:
            # Not as CollectiveError, which would mark the model as damaged.
            raise RuntimeError(str(error)) from error

    def _copy(self, update: Update) -> ShardStorage:
        gradient, copy, tier = update.gradient, self._copies.get(update.index), self._near(update.index)
        if copy is None or copy.dtype != gradient.dtype:
            padded = -(-gradient.numel // gradient.grain) * gradient.grain
            copy = self._tiers.device.allocate(tier, padded, gradient.dtype)
            self._copies[update.index] = copy
        gradient.fetch(copy, 0, tier).wait()
        return MemoryShard(tier, copy[: gradient.numel], self._tiers.transfers, self._tiers.device)

    def _forget(self) -> None:
        self._job, self.in_progress = None, False
        if self._joining is not None:
            self._joining.detach()
            self._joining = None


def _step_of(
    stepper: Stepper, updates: Sequence[Update], scale: torch.Tensor, used: frozenset[str], device: Device
) -> Callable[[], list[int]]:
    stream = device.inherit_stream()

    def step() -> list[int]:
        # A thread starts with gradients enabled and in its own stream, and state may be on the device.
        with torch.no_grad(), stream:
            return list(stepper.step(updates, scale, used))

    return step


class _Job:
    """A call that is made once: on a thread of its own if that is started, else by the reader of the result.
    The interpreter's exit waits for the thread, before it closes stores. ``bus`` gets events of how long the
    thread is waited for, and of nothing on it."""

    def __init__(self, call: Callable[[], list[int]], bus: Bus) -> None:
        self._bus = bus
        self._call: Callable[[], list[int]] | None = call
        self._thread: threading.Thread | None = None
        self._numbers: list[int] = []
        self._error: Exception | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run_beside, name="zero_ext delayed update", daemon=False)
        self._thread.start()

    def join(self) -> None:
        # The garbage collector may run on the thread itself.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def result(self) -> list[int]:
        """Return what the call returned; raise what it raised."""
        if self._thread is None:
            self._run()
        elif self._thread.is_alive():
            began = self._bus.now()
            self.join()
            self._bus.waited("update", began)
        if self._error is not None:
            raise self._error
        return self._numbers

    def _run_beside(self) -> None:
        with self._bus.background():
            self._run()

    def _run(self) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        try:
            self._numbers = call()
        except Exception as error:
            self._error = error
