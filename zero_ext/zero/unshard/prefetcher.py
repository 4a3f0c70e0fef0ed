"""Which units are gathered: on demand, ahead of need, under a cap on live parameters."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

from zero_ext.config import UnitConfig
from zero_ext.config.events import Bus, GatherEvent, ReleaseEvent
from zero_ext.zero.memory.lookahead import is_reused, look_ahead
from zero_ext.zero.units.unit import Unit, UnitState
from zero_ext.zero.unshard.gather_order import GatherOrder

_RETAINED = object()  # holds units whose values a second backward pass will need


class Prefetcher:
    """Gathers and releases the sharded units of one model.

    As ``policy`` says. The next unit is always gathered ahead, further ones as long as all that is ahead
    stays within ``prefetch_elements``; 0 gathers nothing ahead. Units gathered ahead of need, or kept for
    their next use, never push the live parameters over ``max_live_elements``; a unit above it is gathered
    alone, with one warning naming it. Between two passes of an order that repeats, what the next one needs
    first stays under way; parameters may be changed only after :meth:`forget_values`. What was written in
    place to gathered parameters goes through ``commit`` (unit, numbers of the parameters) before they are
    released.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        policy: UnitConfig,
        bus: Bus,
        commit: Callable[[Unit, list[int]], None],
    ) -> None:
        self.units = tuple(unit for unit in units if unit.placement.params)
        self.backward_order = GatherOrder()
        self.forward_order = GatherOrder(then=self.backward_order)
        self._live_limit = policy.max_live_elements
        self._fits = sum(unit.layout.numel for unit in self.units) <= self._live_limit  # all of them at once
        self._prefetch_limit = policy.prefetch_elements
        self._reuse_limit = policy.reuse_elements
        self._retained: set[Unit] = set()  # for their next use, farther than one looks ahead
        self._bus = bus
        self._commit = commit
        self._warned: set[str] = set()
        self.borrowers: set[object] = set()  # blocks of code that use whole parameters, replicated or not

    @property
    def live_elements(self) -> int:
        """Elements of all units that are gathered or being gathered."""
        return sum(unit.layout.numel for unit in self.units if unit.state is not UnitState.RELEASED)

    def order_of_forward(self) -> GatherOrder:
        """Return the order that the forward about to run follows and records.

        With every unit held from outside, ranks may run different numbers of forwards through different
        blocks. What they record must not steer look-ahead, whose exchanges all ranks start alike.
        """
        return GatherOrder() if all(unit.holders for unit in self.units) else self.forward_order

    def need(self, unit: Unit, holder: object, order: GatherOrder, exact: bool = False) -> None:
        """Makes ``unit`` present for ``holder`` and starts to gather what comes next in ``order``; ``exact``:
        with the values of its shards, unless somebody holds it."""
        if not unit.placement.params or holder in unit.holders:
            return
        for skipped in order.needed(unit):
            # Gathered ahead for nothing; where the order changes from step to step such units would pile up.
            if not skipped.holders and skipped is not unit:
                self._evict(skipped)
        if exact and not unit.exact and not unit.holders:
            self._evict(unit)
        if unit.state is not UnitState.GATHERED:
            self._gather(unit, exact)
        unit.holders.add(holder)
        self._prefetch(order)

    def release(self, unit: Unit, holder: object, order: GatherOrder | None = None) -> None:
        """Ends ``holder``'s need; the unit is released when nobody holds it, unless ``order``, or backward
        after it, expects it next or within the limit of reuse."""
        unit.holders.discard(holder)
        if unit.state is not UnitState.GATHERED or unit.holders or not unit.placement.params:
            return
        if order is not None and self._stays(unit, order) and not unit.written():
            unit.set_aside()
        else:
            self._evict(unit)

    def retain(self, units: Iterable[Unit], reason: str) -> None:
        """Keep ``units`` gathered until :meth:`release_retained`, and warn of the ``reason`` once.

        For a backward pass that needs them at a time that hooks cannot foresee.
        """
        for unit in units:
            self.need(unit, _RETAINED, self.backward_order)
        if reason not in self._warned and self.units:
            self._warned.add(reason)
            warnings.warn(
                f"{reason}: its parameters stay gathered until the next optimizer.step() or zero_grad(). Run "
                "forward and backward inside 'with zero_ext.double_backward(model):' to hold one unit at a "
                "time.",
                RuntimeWarning,
                stacklevel=2,
            )

    def retain_present(self, unit: Unit) -> None:
        """Keep ``unit``, which is gathered, until :meth:`release_retained`."""
        if unit.placement.params:
            unit.holders.add(_RETAINED)

    def release_retained(self) -> None:
        """Release what :meth:`retain` keeps."""
        for unit in self.units:
            if _RETAINED in unit.holders:
                self.release(unit, _RETAINED)

    def release_all(self) -> None:
        """Releases every unit that is not retained, also those gathered ahead and never used."""
        for unit in self.units:
            unit.holders.intersection_update({_RETAINED})
            if not unit.holders:
                self._evict(unit)

    def release_idle(self) -> None:
        """Releases the units that nobody holds, also those on their way."""
        for unit in self.units:
            if not unit.holders:
                self._evict(unit)

    def forget_values(self) -> None:
        """Before shards change: releases the units that nobody holds, and drops what nodes keep of others'
        shards."""
        self.release_retained()
        self.release_idle()
        for unit in self.units:
            unit.param_gather.invalidate()

    def expects_gathers(self) -> bool:
        """Whether the backward pass under way will begin to gather units, as far as its order is known."""
        left = (UnitState.RELEASED, UnitState.FETCHING)
        return any(unit.state in left for unit in self.backward_order.upcoming())

    def begin_backward(self) -> None:
        """At the beginning of a backward pass: releases what a forward has left for anything else. Updates
        may run in backward, of what only the next forward needs."""
        self.backward_order.begin()
        self._release_unexpected(self.backward_order)

    def end_backward(self) -> None:
        """At the end of a backward pass: releases every unit that is not retained."""
        self.backward_order.finish()
        self.release_all()

    def end_pass(self, order: GatherOrder) -> None:
        """At the end of a forward: releases what nobody holds, but for what is expected next. That is
        started where another forward follows; backward starts it itself, as it may never come."""
        order.finish()
        self._release_unexpected(order)
        if order.repeats:
            self._prefetch(order)

    def _stays(self, unit: Unit, order: GatherOrder) -> bool:
        if self._is_first(unit, order):
            return self._fits_in(0)
        expected = order.upcoming(beyond=True) if self._reuse_limit else ()
        if not self._is_reused(unit, expected):
            return False
        # What is gathered ahead has its room first.
        following = next((each for each in expected if each.state is UnitState.RELEASED), None)
        if self._fits_in(0 if following is None else following.layout.numel):
            self._retained.add(unit)
        return unit in self._retained

    def _is_reused(self, unit: Unit, expected: Sequence[Unit]) -> bool:
        return is_reused(unit, expected, _numel, self._reuse_limit)

    def _release_unexpected(self, order: GatherOrder) -> None:
        expected = order.upcoming(beyond=True)
        wanted = set(self._window(expected))
        for unit in self.units:
            retained = unit in self._retained and self._is_reused(unit, expected)
            if not unit.holders and not retained and unit not in wanted:
                self._evict(unit)

    def _evict(self, unit: Unit) -> None:
        self._retained.discard(unit)
        if unit.state is UnitState.GATHERED:
            self._release(unit)
        elif unit.state is not UnitState.RELEASED:
            unit.to_released()  # never was present: no event

    def _gather(self, unit: Unit, exact: bool) -> None:
        began, prefetched = time.perf_counter(), unit.state is not UnitState.RELEASED
        if not prefetched:
            self._free_space(unit)
        again = unit.is_aside
        self._retained.discard(unit)
        unit.ensure_gathered(exact)
        if self._bus and not again:
            seconds = time.perf_counter() - began
            self._bus.publish(GatherEvent(unit.name, unit.layout.numel, prefetched, seconds))

    def _release(self, unit: Unit) -> None:
        try:
            written = unit.written()
            if written:
                self._commit(unit, written)
        finally:
            unit.to_released()
        if self._bus:
            self._bus.publish(ReleaseEvent(unit.name, unit.layout.numel))

    def _fits_in(self, numel: int) -> bool:
        """Whether ``numel`` more elements may be live."""
        return self._fits or self.live_elements + numel <= self._live_limit

    def _free_space(self, unit: Unit) -> None:
        for other in self.units:
            if self._fits_in(unit.layout.numel):
                return
            if other is not unit and not other.holders:
                self._evict(other)
        if not self._fits_in(unit.layout.numel) and unit.name not in self._warned:
            self._warned.add(unit.name)
            warnings.warn(
                f"{unit.describe()} has {unit.layout.numel} elements and {self.live_elements} others are in "
                f"use: more than 'units.max_live_elements' = {self._live_limit}. It is gathered all the "
                "same, without look-ahead; raise the limit or name smaller blocks in 'units.block_classes'.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _prefetch(self, order: GatherOrder) -> None:
        for position, unit in enumerate(self._window(order.upcoming())):
            if unit.state is UnitState.RELEASED:
                if not self._fits_in(unit.layout.numel):
                    return
                unit.to_fetching()
                if unit.storage.tier != "nvme":
                    unit.to_gathering()
            elif unit.state is UnitState.FETCHING and position == 0 and unit.needs_early_gather:
                # Decided by position alone: exchanges must start in one order on all ranks.
                unit.to_gathering()

    def _is_first(self, unit: Unit, order: GatherOrder) -> bool:
        """Whether ``unit``, if it were released, would be the first that should be under way."""
        for expected in order.upcoming(beyond=True) if self._prefetch_limit else ():
            if expected is unit or expected.state is not UnitState.GATHERED:
                return expected is unit
        return False

    def _window(self, expected: Sequence[Unit]) -> Iterator[Unit]:
        """The units that should be under way: those ``expected`` next and not gathered."""
        ahead = (
            unit for unit in expected if unit.state is not UnitState.GATHERED and unit not in self._retained
        )
        return look_ahead(ahead, _numel, _is_stored, self._prefetch_limit)


def _numel(unit: Unit) -> int:
    return unit.layout.numel


def _is_stored(unit: Unit) -> bool:
    return unit.storage.tier == "nvme"
