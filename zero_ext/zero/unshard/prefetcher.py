"""The gathering of units: on demand, ahead of need by the recorded order, under a cap on live parameters."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

from zero_ext.config import UnitConfig
from zero_ext.config.events import Bus, GatherEvent, ReleaseEvent
from zero_ext.config.tiers import is_stored
from zero_ext.zero.memory.gathered_unit import ExpertSelection, GatheredUnit, UnitState

U = TypeVar("U", bound=GatheredUnit)

_RETAINED = object()  # holds units for a second backward pass


class GatherOrder(Generic[U]):
    """The units of one pass (forward or backward) in the order they were needed.

    The longest complete pass is the prediction, or a shorter one once two in turn were alike; a pass that
    departs from it costs time, never correctness: the cursor moves to the next place where the needed unit is
    expected, or stays. Where passes repeat (``repeats``: forwards without autograd, token after token) the
    last one is the prediction, and after its end comes its beginning. Of any other the pass ``then`` follows.
    """

    def __init__(self, then: GatherOrder[U] | None = None) -> None:
        self._recorded: list[U] = []
        self._trace: list[U] = []
        self._last: list[U] = []  # the pass before this one
        self._cursor = 0
        self._then = then
        # How often units with routed experts were needed, in this pass and in the last one.
        self._routed = self._routed_before = 0
        self.repeats = False

    def begin(self, repeats: bool = False) -> None:
        """Start a pass; ``repeats`` if another one like it will follow."""
        self.repeats = repeats
        self._trace = []
        self._cursor = self._routed = 0

    @property
    def expects_routed(self) -> bool:
        """Return whether the pass before this one needed units with routed experts more often."""
        return self._routed < self._routed_before

    def needed(self, unit: U) -> list[U]:
        """Note that ``unit`` is needed now; the units that were expected before it."""
        if unit.spec.experts:
            # Nothing gathers it ahead, because the next pass may be routed to other experts.
            self._routed += 1
            return []
        self._trace.append(unit)
        for position in range(self._cursor, len(self._recorded)):
            if self._recorded[position] is unit:
                skipped, self._cursor = self._recorded[self._cursor : position], position + 1
                return skipped
        return []

    def finish(self) -> None:
        """End a pass: what was needed in it may be expected from now on."""
        trace, last, self._last = self._trace, self._last, self._trace
        self._routed_before = self._routed
        # A block that is called by itself is no pass of the model.
        if len(trace) > 1 or not self._recorded:
            if self.repeats or trace == last or len(trace) > len(self._recorded):
                self._recorded = trace
            self._trace = []
            # Between passes nothing is expected, unless the order repeats.
            self._cursor = len(self._recorded)

    def expect(self, units: Iterable[U]) -> None:
        """Predict a pass that needs ``units`` in this order, before any was recorded."""
        self._recorded = [unit for unit in units if not unit.spec.experts]

    def upcoming(self, beyond: bool = False) -> Iterator[U]:
        """Yield the units expected next, nearest first; ``beyond``: also those of the pass that follows."""
        yield from islice(self._recorded, self._cursor, None)
        if self.repeats:
            yield from islice(self._recorded, self._cursor)
        elif beyond and self._then is not None:
            yield from self._then._recorded


class Prefetcher(Generic[U]):
    """Gathers and releases the sharded units of one model.

    As ``policy`` says. The next unit is always gathered ahead, further ones as long as all that is ahead
    stays within ``prefetch_elements``; 0 gathers nothing ahead. Units gathered ahead of need, or kept for
    their next use, never push the live parameters over ``max_live_elements``; a unit above it is gathered
    alone, with one warning naming it. Between two passes of an order that repeats, what the next one needs
    first stays under way; parameters may be changed only after :meth:`forget_values`. What was written in
    place to gathered parameters goes through ``commit`` (unit, numbers of the parameters) before they are
    released. Memory plans and simulated steps run the same code, with units that have sizes only. Their
    number may be large, so nothing that runs per unit goes over all units.
    """

    def __init__(
        self,
        units: Sequence[U],
        policy: UnitConfig,
        bus: Bus,
        commit: Callable[[U, list[int]], None],
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.units = tuple(unit for unit in units if unit.spec.placement.params)
        self.backward_order = GatherOrder[U]()
        self.forward_order = GatherOrder(then=self.backward_order)
        self._numbers = {unit: number for number, unit in enumerate(self.units)}
        self._seen_live = set(self.units)  # all that are not released, and some that are
        self._live_limit = policy.max_live_elements
        self._fits = sum(unit.spec.numel for unit in self.units) <= self._live_limit  # all together
        self._prefetch_limit = policy.prefetch_elements
        self._reuse_limit = policy.reuse_elements
        self._retained: set[U] = set()  # for their next use, farther than one looks ahead
        self._bus, self._commit = bus, commit
        self._warn = warn or _warn
        self._warned: set[str] = set()
        self.borrowers: set[object] = set()  # blocks of code that use whole parameters, replicated or not

    @property
    def live_elements(self) -> int:
        """Elements of all units that are gathered or being gathered."""
        return sum(unit.spec.numel for unit in self._live())

    def _live(self) -> set[U]:
        self._seen_live = {unit for unit in self._seen_live if unit.state is not UnitState.RELEASED}
        return self._seen_live

    def _live_in_order(self) -> list[U]:
        # Callers release in this order. A release waits for exchanges and commits writes, which is a
        # collective, and the order of a set differs between ranks.
        return sorted(self._live(), key=self._numbers.__getitem__)

    def order_of_forward(self) -> GatherOrder[U]:
        """Return the order that the forward about to run follows and records. With every unit held from
        outside, ranks may run different numbers of forwards through different blocks. What they record must
        not steer look-ahead, as all ranks start its exchanges alike."""
        return GatherOrder() if all(unit.holders for unit in self.units) else self.forward_order

    def need(
        self,
        unit: U,
        holder: object,
        order: GatherOrder[U],
        exact: bool = False,
        experts: ExpertSelection = None,
    ) -> None:
        """Make ``unit`` present for ``holder`` and start to gather what comes next in ``order``; ``exact``:
        with the values of its shards, unless somebody holds it. Of a unit with experts, those in ``experts``
        are present afterwards, and others that somebody else needs."""
        if not unit.spec.placement.params or holder in unit.holders:
            return
        for skipped in order.needed(unit):
            # Gathered ahead for nothing. If the order changes in every step, such units would pile up.
            if not skipped.holders and skipped is not unit:
                self._evict(skipped)
        if exact and not unit.exact and not unit.holders:
            self._evict(unit)
        if unit.state is not UnitState.GATHERED:
            self._gather(unit, exact, experts)
        if unit.spec.experts:
            unit.cover(experts)
        unit.holders.add(holder)
        self._prefetch(order)

    def release(self, unit: U, holder: object, order: GatherOrder[U] | None = None) -> None:
        """End ``holder``'s need; the unit is released when nobody holds it, unless ``order``, or backward
        after it, expects it next or within the limit of reuse."""
        unit.holders.discard(holder)
        if unit.state is not UnitState.GATHERED or unit.holders or not unit.spec.placement.params:
            return
        # ``set_aside`` sets the version counters that show writes. Only eviction
        # commits writes to the shards.
        if order is not None and self._stays(unit, order) and not unit.written():
            unit.set_aside()
        else:
            self._evict(unit)

    def retain(self, units: Iterable[U], reason: str) -> None:
        """Keep ``units`` gathered until :meth:`release_retained`, and warn of the ``reason`` once. For a
        backward pass that needs them at a time that hooks cannot foresee."""
        for unit in units:
            self.need(unit, _RETAINED, self.backward_order)
        if reason not in self._warned and self.units:
            self._warned.add(reason)
            self._warn(
                f"{reason}: its parameters stay gathered until the next optimizer.step() or zero_grad(). Run "
                "forward and backward inside 'with zero_ext.double_backward(model):' to hold one unit at a "
                "time."
            )

    def retain_present(self, unit: U) -> None:
        """Keep ``unit``, which is gathered, until :meth:`release_retained`."""
        if unit.spec.placement.params:
            unit.holders.add(_RETAINED)

    def release_retained(self) -> None:
        """Release what :meth:`retain` keeps."""
        for unit in self.units:
            if _RETAINED in unit.holders:
                self.release(unit, _RETAINED)

    def release_all(self) -> None:
        """Release every unit that is not retained, also those gathered ahead and never used."""
        for unit in self.units:
            unit.holders.intersection_update({_RETAINED})
            if not unit.holders:
                self._evict(unit)

    def release_idle(self) -> None:
        """Release the units that nobody holds, also those on their way."""
        for unit in self.units:
            if not unit.holders:
                self._evict(unit)

    def forget_values(self) -> None:
        """Before shards change: releases units that nobody holds, and what nodes keep of others' shards."""
        self.release_retained()
        self.release_idle()
        for unit in self.units:
            unit.invalidate()

    def expects_gathers(self) -> bool:
        """Return whether the running backward pass will gather units, as far as its order is known."""
        left = (UnitState.RELEASED, UnitState.FETCHING)
        order = self.backward_order
        return order.expects_routed or any(unit.state in left for unit in order.upcoming())

    def begin_backward(self) -> None:
        """At the beginning of a backward pass: releases what a forward has left for anything else. Updates
        may run in backward, of what only the next forward needs."""
        self.backward_order.begin()
        self._release_unexpected(self.backward_order)

    def end_backward(self) -> None:
        """At the end of a backward pass: releases every unit that is not retained."""
        self.backward_order.finish()
        self.release_all()

    def end_pass(self, order: GatherOrder[U]) -> None:
        """At the end of a forward: releases what nobody holds, but for what is expected next. That is
        started where another forward follows; backward starts it itself, as it may never come."""
        order.finish()
        self._release_unexpected(order)
        if order.repeats:
            self._prefetch(order)

    def _stays(self, unit: U, order: GatherOrder[U]) -> bool:
        if self._is_first(unit, order):
            return self._fits_in(0)
        if not self._is_reused(unit, order):
            return False
        # Look-ahead has priority over reuse within the limit.
        expected = order.upcoming(beyond=True)
        following = next((each for each in expected if each.state is UnitState.RELEASED), None)
        if self._fits_in(0 if following is None else following.spec.numel):
            self._retained.add(unit)
        return unit in self._retained

    def _is_reused(self, unit: U, order: GatherOrder[U]) -> bool:
        """Return whether ``unit`` is needed again before more than the limit of reuse is used."""
        used = 0
        for other in order.upcoming(beyond=True) if self._reuse_limit else ():
            if other is unit:
                return True
            used += other.spec.numel
            if used > self._reuse_limit:
                break
        return False

    def _release_unexpected(self, order: GatherOrder[U]) -> None:
        wanted = set(self._window(order.upcoming(beyond=True)))
        for unit in self._live_in_order():
            retained = unit in self._retained and self._is_reused(unit, order)
            if not unit.holders and not retained and unit not in wanted:
                self._evict(unit)

    def _evict(self, unit: U) -> None:
        self._retained.discard(unit)
        if unit.state is UnitState.GATHERED:
            self._release(unit)
        elif unit.state is not UnitState.RELEASED:
            unit.to_released()  # never was present: no event

    def _gather(self, unit: U, exact: bool, experts: ExpertSelection) -> None:
        began, prefetched = time.perf_counter(), unit.state is not UnitState.RELEASED
        if not prefetched:
            self._free_space(unit)
        again = unit.is_aside
        self._retained.discard(unit)
        if unit.state is UnitState.RELEASED:
            self._fetch(unit, exact, experts)
        if unit.state is UnitState.FETCHING:
            unit.to_gathering()
        if unit.state is UnitState.GATHERING:
            unit.to_gathered()
        if self._bus and not again:
            seconds = time.perf_counter() - began
            self._bus.publish(GatherEvent(unit.spec.name, unit.spec.numel, prefetched, seconds))

    def _fetch(self, unit: U, exact: bool = False, experts: ExpertSelection = None) -> None:
        self._seen_live.add(unit)
        unit.to_fetching(exact, experts)

    def _release(self, unit: U) -> None:
        try:
            written = unit.written()
            if written:
                self._commit(unit, written)
        finally:
            # Also if the ranks refuse the write. Otherwise the unit would stay gathered without a holder.
            unit.to_released()
        if self._bus:
            self._bus.publish(ReleaseEvent(unit.spec.name, unit.spec.numel))

    def _fits_in(self, numel: int) -> bool:
        """Return whether ``numel`` more elements may be live."""
        return self._fits or self.live_elements + numel <= self._live_limit

    def _free_space(self, unit: U) -> None:
        for other in self._live_in_order() if not self._fits_in(unit.spec.numel) else ():
            if self._fits_in(unit.spec.numel):
                return
            if other is not unit and not other.holders:
                self._evict(other)
        if not self._fits_in(unit.spec.numel) and unit.spec.name not in self._warned:
            self._warned.add(unit.spec.name)
            self._warn(
                f"{unit.describe()} has {unit.spec.numel} elements and {self.live_elements} others are in "
                f"use: more than 'units.max_live_elements' = {self._live_limit}. It is gathered "
                "anyway, without look-ahead. Raise the limit or name smaller blocks in 'units.block_classes'."
            )

    def _prefetch(self, order: GatherOrder[U]) -> None:
        for position, unit in enumerate(self._window(order.upcoming())):
            if unit.state is UnitState.RELEASED:
                if not self._fits_in(unit.spec.numel):
                    return
                self._fetch(unit)
                if not _is_stored(unit):
                    unit.to_gathering()
            elif unit.state is UnitState.FETCHING and position == 0 and unit.needs_early_gather:
                # Decided by position alone: exchanges must start in one order on all ranks.
                unit.to_gathering()

    def _is_first(self, unit: U, order: GatherOrder[U]) -> bool:
        """Return whether ``unit``, if it were released, would be the first that should be under way."""
        for expected in order.upcoming(beyond=True) if self._prefetch_limit else ():
            if expected is unit or expected.state is not UnitState.GATHERED:
                return expected is unit
        return False

    def _window(self, expected: Iterable[U]) -> Iterator[U]:
        """Yield the units that should be under way: those ``expected`` next and not gathered, nearest first.
        The next one always is, and further ones while all of them stay within the limit of prefetching. A
        shard on NVMe is read before it is gathered, so two such units always are. With limit 0 none is."""
        ahead, seen = 0, set[U]()
        for unit in expected if self._prefetch_limit else ():
            if unit.state is UnitState.GATHERED or unit in self._retained or unit in seen:
                continue
            ahead += unit.spec.numel
            if ahead > self._prefetch_limit and len(seen) >= (2 if _is_stored(unit) else 1):
                return
            seen.add(unit)
            yield unit


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def _is_stored(unit: GatheredUnit) -> bool:
    return is_stored(unit.spec.placement.params_tier)
