"""A backward pass as one event: from the first hook that fires to autograd's final callback."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator

import torch

from zero_ext.zero.units.unit import Unit
from zero_ext.zero.unshard.call_stack import BlockCall
from zero_ext.zero.unshard.prefetcher import Prefetcher
from zero_ext.zero.unshard.step_clock import Beginning, StepClock


def in_backward() -> bool:
    """Return whether this thread runs inside autograd's engine (recomputation of a checkpoint, a hook)."""
    return bool(torch._C._current_graph_task_id() != -1)


class BackwardPass:
    """Tracks whether a backward pass of the model is under way and which calls hold units in it.

    ``on_begin`` runs when the first hook of a pass fires and may refuse it by raising, ``on_end`` after the
    last gradient, ``on_abandon`` when a new forward or ``zero_grad`` finds a pass that an exception has cut
    off. ``on_passed`` is called with a unit that no call will need in backward any more: gradients that are
    still missing will not come.
    """

    def __init__(
        self,
        prefetcher: Prefetcher,
        clock: StepClock,
        on_passed: Callable[[Unit], None],
        on_begin: Callable[[], None],
        on_end: Callable[[], None],
        on_abandon: Callable[[], None],
    ) -> None:
        self._prefetcher = prefetcher
        self._clock = clock
        self._began: Beginning | None = None
        self._on_begin = on_begin
        self._on_end = on_end
        self._on_abandon = on_abandon
        self._on_passed = on_passed
        # Of each unit the calls whose backward is to come; one that never comes goes with its graph.
        self._expected: dict[Unit, weakref.WeakSet[BlockCall]] = {}
        self._holding: set[BlockCall] = set()
        self._awaited: weakref.WeakSet[BlockCall] = weakref.WeakSet()
        self.running = False

    def enter(self) -> None:
        """Begin the pass at the first call; every hook that fires in backward calls this."""
        if self.running:
            return
        self._start()
        weak = weakref.ref(self)

        def end() -> None:
            alive = weak()
            if alive is not None:
                alive.end()

        torch.autograd.Variable._execution_engine.queue_callback(end)

    @contextlib.contextmanager
    def by_hand(self) -> Iterator[None]:
        """Run a pass that begins and ends here, and not with autograd's own, which are part of it."""
        self._start()
        yield
        self.end()

    def _start(self) -> None:
        self._began = self._clock.begin()
        self._on_begin()
        self.running = True
        self._prefetcher.begin_backward()

    @property
    def awaited(self) -> bool:
        """Return whether there are outputs of a forward that no backward has run through yet."""
        return bool(self._awaited)

    def expect(self, call: BlockCall) -> None:
        """Note that a forward has ended ``call``, which a backward may run through."""
        self._awaited.add(call)
        for unit in call.touched:
            self._expected.setdefault(unit, weakref.WeakSet()).add(call)

    def hold(self, call: BlockCall) -> None:
        """Note that ``call`` holds units until :meth:`release` or the end."""
        self._awaited.discard(call)
        if call not in self._holding:
            call.awaited = call.inputs
            self._holding.add(call)

    def release(self, call: BlockCall) -> None:
        """Every input of ``call`` has its gradient: its units are not needed any more."""
        self._holding.discard(call)
        for unit in call.touched:
            self._prefetcher.release(unit, call)
            expected = self._expected.get(unit)
            if call.has_leaf_inputs or expected is None or not (call.repeats or call in expected):
                continue
            expected.discard(call)
            if not expected and not unit.holders:
                self._on_passed(unit)

    def end(self) -> None:
        """Close the pass: releases every unit, then finishes the gradients."""
        self.running = False
        self._holding.clear()
        self._prefetcher.end_backward()
        self._on_end()
        self._clock.end("backward", self._began)

    def abandon(self) -> None:
        """At a new forward or ``zero_grad``: forgets a pass that an exception has cut off."""
        if self.running:
            self.running = False
            self._holding.clear()
            self._prefetcher.release_all()
            self._on_abandon()
