"""Running calls of blocks, and a backward pass as one event, from its first hook to autograd's last call."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import nn

from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.zero.memory.gathered_unit import ExpertSelection
from zero_ext.zero.units.unit import Unit
from zero_ext.zero.unshard.prefetcher import Prefetcher
from zero_ext.zero.unshard.step_clock import Beginning, StepClock


class BlockCall:
    """One call of a block: a holder of units, in forward and again in its backward.

    ``inputs`` counts the block's gradient-requiring inputs, ``awaited`` those without a gradient yet
    in this backward pass; at zero the backward of this call is over and its units may go. ``repeats`` says
    that backward runs a call of the forward again; ``has_leaf_inputs`` that the gradient of an input may
    arrive before those of the parameters; ``alone`` that no block runs around the module, which is none.
    Of the units that it ``touched``, backward needs those that it ``rereads``. Of a unit in ``routed`` the
    call needs only these experts. ``reached`` are the experts that tokens of any rank reach in this call of a
    mixture, None in other calls.
    """

    def __init__(self, block: nn.Module, name: str, repeats: bool, alone: bool = False) -> None:
        self.block, self.name, self.repeats, self.alone = block, name, repeats, alone
        self.touched: list[Unit] = []
        self.rereads: list[Unit] = []
        self.routed: dict[Unit, ExpertSelection] = {}
        self.reached: frozenset[int] | None = None
        self.joins_backward = False  # even where its outputs depend on nothing that is differentiated
        self.inputs = 0
        self.has_leaf_inputs = False
        self.awaited = 0

    @property
    def looks_up(self) -> bool:
        """Return whether backward needs nothing of what the call needed."""
        return bool(self.touched) and not self.rereads

    def touch(self, unit: Unit, again: bool) -> None:
        """Note that the call needs ``unit``; ``again``: its backward too."""
        if unit not in self.touched:
            self.touched.append(unit)
        if again and unit not in self.rereads:
            self.rereads.append(unit)


class CallStack(list[BlockCall]):
    """The calls that are running now, innermost last."""

    def leave(self, block: nn.Module) -> BlockCall:
        """Leave the innermost call of ``block``, and with it calls inside that an exception has ended."""
        while self:
            call = self.pop()
            if call.block is block:
                return call
        raise zero_ext_bug(f"{type(block).__name__} left a call that it never entered")

    def runs_alone(self, block: nn.Module) -> bool:
        """Return whether the innermost call is one of ``block`` by itself."""
        return bool(self) and self[-1].alone and self[-1].block is block

    def holder_for(self, block: nn.Module | None) -> BlockCall:
        """Return the call to hold a unit of ``block``: its running call, else the innermost."""
        for call in reversed(self):
            if call.block is block:
                return call
        return self[-1]


def in_backward() -> bool:
    """Return whether this thread runs inside autograd's engine (recomputation of a checkpoint, a hook)."""
    return bool(torch._C._current_graph_task_id() != -1)


class BackwardPass:
    """Tracks whether a backward pass of the model is under way and which calls hold units in it.

    ``on_begin`` runs when the first hook of a pass fires and may refuse it by raising, ``on_end`` after the
    last gradient, ``on_abandon`` when a new forward or ``zero_grad`` finds a pass that an exception has cut
    off. ``on_passed`` is called with a unit that no call will need in backward any more: gradients that are
    still missing will not come. ``on_reached`` is called with the name of a mixture and the experts that
    tokens have reached in a call of it, when backward begins to run through that call.
    """

    def __init__(
        self,
        prefetcher: Prefetcher,
        clock: StepClock,
        on_reached: Callable[[str, frozenset[int]], None],
        on_passed: Callable[[Unit], None],
        on_begin: Callable[[], None],
        on_end: Callable[[], None],
        on_abandon: Callable[[], None],
    ) -> None:
        self._prefetcher, self._clock = prefetcher, clock
        self._began: Beginning | None = None
        self._on_begin, self._on_end, self._on_abandon = on_begin, on_end, on_abandon
        self._on_reached, self._on_passed = on_reached, on_passed
        # The calls of each unit that a backward may still run through. The sets are weak: only
        # hooks in the graph own a call, so a call without backward goes with its graph.
        self._expected: dict[Unit, weakref.WeakSet[BlockCall]] = {}
        self._holding: set[BlockCall] = set()
        self._awaited: weakref.WeakSet[BlockCall] = weakref.WeakSet()
        self.running = False

    def enter(self) -> None:
        """Begin the pass at the first call; every hook that fires in backward calls this."""
        if self.running:
            return
        self._start()
        # Autograd owns the queued function until the pass ends. Like all hooks it
        # must not keep an engine alive.
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
        # There is no ``finally``: after an exception the pass counts as running, so that the next
        # forward or zero_grad abandons it, as it does a pass of autograd that broke off.
        yield
        self.end()

    def _start(self) -> None:
        self._began = self._clock.begin()
        # If on_begin refuses the pass, ``running`` must stay False. Otherwise the next forward
        # would abandon a pass that never began and clear the gradients of the one before.
        self._on_begin()
        self.running = True
        self._prefetcher.begin_backward()

    @property
    def is_captured(self) -> bool:
        """Return whether what runs now goes into a graph and is no pass that has begun."""
        return not self.running and self._clock.device.captures

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
            # The hook of every output of the call comes here. Only the first one sets the
            # count, because gradients of inputs may arrive before the others run.
            call.awaited = call.inputs
            self._holding.add(call)
            # Not in forward: gradients may be cleared between forward and backward.
            self.note_reached(call)

    def note_reached(self, call: BlockCall) -> None:
        """Note that a backward runs, or may run, through a call with tokens on some experts."""
        if call.reached is not None:
            self._on_reached(call.name, call.reached)

    def release(self, call: BlockCall) -> None:
        """Every input of ``call`` has its gradient: its units are not needed any more."""
        self._holding.discard(call)
        for unit in call.touched:
            self._prefetcher.release(unit, call)
            expected = self._expected.get(unit)
            # The gradient of a leaf input may arrive before those of the parameters, so it does not say that
            # these are complete. A call that backward runs again stands for one of the forward. Any other
            # that is not expected was passed before, in an earlier backward through the same graph.
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
