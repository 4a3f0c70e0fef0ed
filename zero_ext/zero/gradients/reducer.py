"""The reduction of gradients: in one order on all ranks, overlapped with backward, few in flight."""

from __future__ import annotations

import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from zero_ext.comm import Collectives
from zero_ext.config.buffer_sizes import REDUCTIONS_IN_FLIGHT, SHARD_TRANSFERS_IN_FLIGHT
from zero_ext.config.events import Bus, ReduceEvent
from zero_ext.config.tiers import is_stored
from zero_ext.offload import SideStream
from zero_ext.zero.gradients.accumulator import UnitGradients
from zero_ext.zero.gradients.gradient_storage import GradientGeneration
from zero_ext.zero.memory.lifetime import weakly
from zero_ext.zero.units.collective_errors import CHECKSUM_RANGE, DeferredError


class Listener(Protocol):
    """Is notified of reductions, and of failed steps with every agreement on gradients."""

    def reduced(self, gradients: UnitGradients) -> None:
        """Handle a finished reduction. If its storage is asynchronous, later ones may have finished, too."""

    def has_failed_step(self) -> bool:
        """Return whether this rank has read that an earlier step was not made."""

    def notify_failed_step(self, bad: bool) -> None:
        """Receive whether an earlier step was not made on any rank (``bad``). All ranks call this."""


class Edits(NamedTuple):
    """Changes in place of shards of gradients since the gradients were cleared."""

    checksum: int = 0  # from 0 to 2**20 - 2, the same on ranks that made the same changes
    last: str = ""


class ReductionSchedule:
    """The number of reductions that begin before each gather of a backward pass.

    Gathers and reductions of a device share one communicator, so ranks must begin them in one order. The
    gathers have one, and so have the reductions, but where these fall among those depends on when a rank's
    gradients arrive. So all ranks keep to what they agreed on: at gather ``n`` every rank has begun the first
    ``due[n]`` reductions, and no more. A reduction that is early waits. One that is late begins with what has
    arrived, and what comes later is reduced after the next agreement on gradients.

    The positions are learned in a pass with the final order of reductions. There they begin when they are
    ready, and before each gather the ranks that are behind catch up with the one that has begun most,
    which they agree on. The same happens where a pass has more gathers than those before. ``ahead`` is
    how many reductions a rank may begin meanwhile: it must not wait on the host for one that others have
    not begun, as they wait for the agreement. After the last gather that was learned there is no such
    limit, if none is expected any more.
    """

    def __init__(self, collectives: Collectives, ahead: int = sys.maxsize) -> None:
        self._collectives, self._ahead = collectives, ahead
        self._due: list[int] | None = None  # until a pass was learned
        self._trace: list[int] = []
        self._expects: Callable[[], bool] = lambda: False

    def begin(self, expects: Callable[[], bool]) -> None:
        """Begin a backward pass that reduces; ``expects`` says whether gathers are still to come in it."""
        self._trace, self._expects = [], expects

    @property
    def most(self) -> int:
        """Return how many reductions may have begun before the next gather."""
        known, position = self._due or [], len(self._trace)
        if position < len(known):
            return known[position]
        if self._ahead == sys.maxsize or (self._due is not None and not self._expects()):
            return sys.maxsize
        return self._ahead + (self._trace[-1] if self._trace else 0)

    def at_gather(self, begun: int) -> int:
        """Return how many reductions begin before the gather that comes now, where ``begun`` have on this
        rank; a collective where it is not known."""
        known, position = self._due or [], len(self._trace)
        due = known[position] if position < len(known) else self._largest(begun)
        self._trace.append(due)
        return due

    def learn(self) -> None:
        """Note the end of the pass; the next ones will be like it."""
        if self._due is None or len(self._trace) > len(self._due):
            self._due = self._trace

    def _largest(self, begun: int) -> int:
        # On the connections for gathers, because all ranks already make these in one order.
        ranks = self._collectives.world_size
        counts = torch.zeros(ranks, dtype=torch.int64, device="cpu")
        own = counts.chunk(ranks)[self._collectives.rank].fill_(begun)
        label = "agreement on where reductions begin"
        self._collectives.gather(counts, own, "scalars", label).wait()
        return int(counts.amax())


class GradientReducer:
    """Starts the reduction of each unit when it and all units before it in the order are complete.

    The order must be the same on every rank although gradients may arrive in different ones (unused
    parameters, other branches). At first it is the reverse of the registration of the units' first
    parameters. After the first step it is rank 0's order of arrival. In host memory units of no block stay
    last. Ranks may use them at different places of their forward, and a rank that waits for one of them keeps
    the others from gathers that they need before they have its gradients. Gradients that come after their
    unit's reduction stay local until the next backward pass or :meth:`synchronize`. A unit that backward has
    passed is not waited for: the other ranks may have its gradients, wait for this rank, and come to none of
    the gathers that it needs to go on.
    """

    def __init__(
        self,
        gradients: Sequence[UnitGradients],
        collectives: Collectives,
        stream: SideStream,
        bus: Bus,
        listener: Listener,
        generation: GradientGeneration,
    ) -> None:
        self._stream, self._listener = stream, listener
        self._agreements = 0
        self.gradients = tuple(gradients)
        self._collectives = collectives
        collectives.continue_in_stream(stream.entered)
        self._bus = bus
        starts = [each.unit.spec.first_parameter for each in self.gradients]
        self._order = sorted(range(len(starts)), key=starts.__getitem__, reverse=True)
        # On a device the schedule sees to it that nobody waits for them.
        self._outside = {
            index for index, start in enumerate(starts) if start < 0 and not collectives.in_one_order
        }
        self._position = {id(unit): index for index, unit in enumerate(self.gradients)}
        self._ready_order: list[int] | None = []
        self._next = 0
        self._schedule: ReductionSchedule | None = None  # in a backward pass, unless a reduction begins
        self._schedules = self._make_schedule()
        self._passed: set[int] = set()  # units that bring no more gradients in this backward pass
        self._flying: deque[UnitGradients] = deque()
        self._moving: deque[UnitGradients] = deque()
        self.edits = Edits()
        self._generation = generation
        self._agreed_at: tuple[int, int] | None = None  # the generation of the last agreement

    def _make_schedule(self) -> ReductionSchedule | None:
        """Return the schedule where gathers and reductions must keep one order."""
        if not self._collectives.in_one_order:
            return None
        placements = [each.unit.placement for each in self.gradients]
        # Only where parameters are sharded may a gather come in backward.
        waits = any(each.params for each in placements) and any(
            {each.grads_tier, each.optimizer_tier} != {"device"} for each in placements
        )
        self._collectives.before_gather = weakly(self._before_gather)
        # Without offload the host waits for no reduction in backward, so any number may begin ahead.
        return ReductionSchedule(self._collectives, *[REDUCTIONS_IN_FLIGHT] * waits)

    def begin_backward(self, reduces: bool, expects_gathers: Callable[[], bool]) -> None:
        """Begin a backward pass, in which gradients are reduced or not, and in which parameters are still to
        be gathered as long as ``expects_gathers`` says so."""
        if reduces and self._schedules is not None:
            self._schedule = self._schedules
            self._schedule.begin(expects_gathers)

    def _before_gather(self) -> None:
        # Unset meanwhile, because both the agreement and a reduction may begin gathers, which come back here.
        schedule, self._schedule = self._schedule, None
        if schedule is not None:
            due = schedule.at_gather(self._next)
            while self._next < due:
                self._start_next()
        self._schedule = schedule

    def arrived(self, gradients: UnitGradients, reduces: bool) -> None:
        """Pack ``gradients``, which is complete, and start the reductions due if the pass ``reduces``."""
        with self._stream.entered():
            gradients.pack()
            if not reduces:
                return
            index = self._position[id(gradients)]
            if self._ready_order is not None and index not in self._ready_order:
                self._ready_order.append(index)
            self._start_ready()

    def passed(self, gradients: UnitGradients) -> None:
        """Mark that ``gradients`` gets no more in this backward pass. Missing gradients count as zero."""
        self._passed.add(self._position[id(gradients)])
        self._start_ready()

    def _start_ready(self) -> None:
        most = len(self._order) if self._schedule is None else self._schedule.most
        while self._next < min(len(self._order), most):
            index = self._order[self._next]
            if not (self.gradients[index].complete or index in self._passed):
                return
            self._start_next()

    def end_backward(self, reduce: bool) -> None:
        """At the end of a backward pass: reduces what is left of the order and waits for everything."""
        # No schedule from here on: after the pass all ranks begin the same collectives in the same order.
        schedule, self._schedule = self._schedule, None
        while reduce and self._next < len(self._order):
            self._start_next()
        if reduce and schedule is not None and self._ready_order is None:
            # Positions are valid for one order of reductions, so the first order teaches none.
            schedule.learn()
        with self._stream.entered():
            for gradients in self.gradients:
                gradients.pack()
        self._drain()
        self._next = 0
        self._passed.clear()

    @property
    def synchronized(self) -> bool:
        """Return whether the ranks have reduced all gradients and agreed on which parameters have one."""
        return self._agreed_at == self._generation.of_agreement

    def synchronize(self, reduce: bool = True) -> bool:
        """Before gradients are read, on all ranks: reduces whatever any rank still holds locally, unless
        ``reduce`` is False. The one agreement of a step that the host waits for.

        Afterwards ``contributed`` names the parameters that got a gradient on any rank. Returns whether these
        were the same on every rank before. Raises :class:`CollectiveError` on all ranks where gradients on
        NVMe are lost on one.
        """
        alike = self._synchronize(reduce)
        if is_stored(*(gradients.storage.tier for gradients in self.gradients)):
            failures = DeferredError()
            for gradients in self.gradients:
                failures.error = failures.error or gradients.storage.failure
            failures.raise_deferred(
                self._collectives,
                "keeping gradients on NVMe",
                "The gradients of this step are lost, nothing was updated: call optimizer.zero_grad() and "
                "repeat it.",
            )
        # Only after the agreement on failures: gradients that are lost on one rank are not settled.
        self._agreed_at = self._generation.of_agreement
        return alike

    def _synchronize(self, reduce: bool) -> bool:
        bad = self._listener.has_failed_step()
        if self._collectives.world_size == 1:
            self._listener.notify_failed_step(bad)
            for gradients in self.gradients:
                if gradients.has_local:
                    self._start(gradients)
            self._drain()
            return True
        flags = [int(bad), *(int(gradients.has_local) for gradients in self.gradients)]
        for gradients in self.gradients:
            flags += [int(i in gradients.contributed) for i in range(len(gradients.unit.parameters))]
        # A rank that makes one more agreement than the others must not take part in their next one.
        self._agreements += 1
        agreed = self._collectives.sum_(
            torch.tensor(flags, dtype=torch.int64, device="cpu"),
            f"agreement on gradients number {self._agreements}",
        ).tolist()
        self._listener.notify_failed_step(bool(agreed.pop(0)))
        position = len(self.gradients)
        alike = all(ranks in (0, self._collectives.world_size) for ranks in agreed[position:])
        # Not strict, because the flags of the parameters follow those of the units.
        for leftover, gradients in zip(agreed, self.gradients, strict=False):
            count = len(gradients.unit.parameters)
            used = agreed[position : position + count]
            gradients.contributed.update(i for i, ranks in enumerate(used) if ranks)
            position += count
            if leftover and reduce:
                self._start(gradients)
        self._drain()
        if self._ready_order is not None and any(agreed):
            # Also with no arrival of its own a rank takes part: rank 0's order counts.
            self._adopt_order(self._ready_order)
            self._ready_order = None
        return alike

    def note_edit(self, name: str, what: str) -> None:
        """Note that a shard of the gradient of parameter ``name`` is changed as ``what`` says. The step
        compares the notes of all ranks."""
        checksum = zlib.crc32(f"{name} {what}".encode(), self.edits.checksum) % CHECKSUM_RANGE
        self.edits = Edits(checksum, f"'{name}'.grad by {what}")

    def _adopt_order(self, ready_order: list[int]) -> None:
        rest = [index for index in self._order if index not in ready_order]
        # A stable sort, which moves only units of no block behind all others.
        indices = sorted(ready_order + rest, key=self._outside.__contains__)
        order = torch.tensor(indices, dtype=torch.int64, device="cpu")
        self._order = self._collectives.broadcast_(order, 0, "agreement on the reduction order").tolist()

    def _start_next(self) -> None:
        gradients = self.gradients[self._order[self._next]]
        self._next += 1
        # Gathers of gradients follow from reductions, on all ranks in the same places.
        schedule, self._schedule = self._schedule, None
        if not gradients.frozen:
            self._start(gradients)
        self._schedule = schedule

    def _start(self, gradients: UnitGradients) -> None:
        with self._stream.entered():
            while len(self._flying) >= REDUCTIONS_IN_FLIGHT:
                self._finish_oldest()
            gradients.start_reduction()
            self._flying.append(gradients)
            if not gradients.reducing:
                self._finish_oldest()  # a single rank's

    def _finish_oldest(self) -> None:
        began = time.perf_counter()
        gradients = self._flying.popleft()
        gradients.finish_reduction()
        self._moving.append(gradients)
        while len(self._moving) > SHARD_TRANSFERS_IN_FLIGHT:
            self._finish_oldest_copy()
        if self._bus:
            unit = gradients.unit
            self._bus.publish(ReduceEvent(unit.name, unit.layout.numel, time.perf_counter() - began))
        if not gradients.storage.is_async:
            self._listener.reduced(gradients)

    def _finish_oldest_copy(self) -> None:
        gradients = self._moving.popleft()
        gradients.storage.wait_transfers()
        if gradients.storage.is_async:
            # What uses it on the host would stand still with the device until it is there.
            self._listener.reduced(gradients)

    def _drain(self) -> None:
        with self._stream.entered():
            while self._flying:
                self._finish_oldest()
            while self._moving:
                self._finish_oldest_copy()
            for gradients in self.gradients:
                gradients.finish_gather()
        # Outside the stream, so that backward's stream waits for it.
        self._stream.join()
