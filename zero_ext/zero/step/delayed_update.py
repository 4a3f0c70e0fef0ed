"""Updates that run alongside the next step's forward and backward: one-step delayed parameter update."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zero_ext.comm import Collectives
from zero_ext.config import Tier
from zero_ext.config.events import Bus
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.offload import Device, MemoryShard, ShardStorage, TierManager
from zero_ext.optim import Stepper, Update
from zero_ext.zero.gradients.accumulator import UnitGradients
from zero_ext.zero.step.update_schedule import MIXTURE, UpdatesAfterBackward, publish, settings_of
from zero_ext.zero.units.collective_errors import CollectiveError, raise_on_all_ranks
from zero_ext.zero.units.master_weights import MasterShard
from zero_ext.zero.units.unit import Unit

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
        stepper: Stepper,
        masters: Sequence[MasterShard],
        gradients: Mapping[Unit, UnitGradients],
        collectives: Collectives,
        groups: Sequence[dict[str, Any]],
        settings: Sequence[dict[str, Any]],
        tiers: TierManager,
    ) -> None:
        super().__init__(stepper, masters, gradients, collectives)
        self._groups = groups
        self._settings = settings
        self._tiers = tiers
        self._copies: dict[int, torch.Tensor] = {}  # copies of gradients, by number of the master
        self._job: _Job | None = None
        self._used: frozenset[str] = frozenset()
        self._joining: weakref.finalize[Any, Any] | None = None

    def run(self, scale: torch.Tensor, used: frozenset[str]) -> None:
        """See :class:`UpdateSchedule`. Copy the gradients. The updates start in :meth:`begin_delayed`,
        or at the latest in :meth:`finish`."""
        if self._job is not None:
            raise zero_ext_bug("the updates of a step before were not finished")
        updates = self._copy_gradients()
        for copied, live in zip(self._settings, settings_of(self._groups), strict=True):
            # In place, because the stepper holds these dictionaries.
            copied.clear()
            copied.update(live)
        # The call must not refer to this object: it lives on while the model goes.
        self._job = _Job(_step_of(self._stepper, updates, scale, used, self._tiers.device), self._tiers.bus)
        self._used = used
        self.in_progress = True

    def begin_delayed(self) -> None:
        """See :class:`UpdateSchedule`."""
        if self._job is not None:
            self._job.start()
            # A model that goes takes its storage and memory along, so the thread has to end first.
            self._joining = weakref.finalize(self, self._job.join)

    def wait(self) -> None:
        """See :class:`UpdateSchedule`."""
        if self._job is not None:
            self._job.result()

    def finish(self) -> None:
        """See :class:`UpdateSchedule`."""
        job = self._job
        if job is None:
            return

        def complete() -> list[int]:
            numbers = job.result()
            for number in numbers:
                self._masters[number].publish(self._used)
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
        """See :class:`UpdateSchedule`: the copies of the gradients."""
        held: Counter[Tier] = Counter()
        for number, copy in self._copies.items():
            held[self._near(number)] += copy.nbytes
        return held

    def _near(self, number: int) -> Tier:
        tier = self._masters[number].state.tier
        return "host" if tier == "nvme" else tier

    def _copy_gradients(self) -> list[Update]:
        """Return updates that read copies of the gradients. A collective where gradients are on NVMe.

        Raises:
            RuntimeError: A copy failed on some rank. It is raised on all ranks, before anything changed.
        """

        def copy() -> list[Update]:
            return [Update(each.index, self._copy(each)) for each in self._updates()]

        if not any(gradients.storage.tier == "nvme" for gradients in self._gradients):
            return copy()
        try:
            return raise_on_all_ranks(
                self._collectives, copy, "reading gradients for the optimizer step", _UNCHANGED
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
    """A call that is made once: on a thread of its own if that is started, else by who asks for the result.

    The interpreter's exit waits for the thread, before it closes stores. ``bus`` gets events of how long the
    thread is waited for, and of nothing on it.
    """

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
