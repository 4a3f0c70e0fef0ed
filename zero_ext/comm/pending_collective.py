"""Collectives under way, and the order in which those of several phases go on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NoReturn

from zero_ext.comm.flight_recorder import (
    CollectiveChannel,
    FlightRecorder,
    MismatchedCollectivesError,
    RecordedCollective,
)
from zero_ext.comm.transport import TransportSelector, Waitable
from zero_ext.config.config_errors import clause_of

Phase = Callable[[], Sequence[Waitable]]  # computes what is sent, if need be, and starts to send it


class PhaseChain:
    """Phases of one collective. Each starts when the one before it has ended."""

    def __init__(self, phases: Iterable[Phase]) -> None:
        self._left = deque(phases)
        self._works = self._left.popleft()()

    def begin_last(self) -> None:
        """Wait for every phase but the last, and start the last one."""
        while self._left:
            for work in self._works:
                work.wait()
            self._works = self._left.popleft()()

    def wait(self) -> None:
        """Wait for all phases."""
        self.begin_last()
        for work in self._works:
            work.wait()


class CollectiveOrder:
    """The order of collectives of several transports that share connections.

    It stores the chain until its last phase has started. ``beside`` enters the stream in which that chain
    continues when another collective starts, so that the stream of the other one need not wait for it.
    """

    def __init__(self) -> None:
        self._unfinished: PhaseChain | None = None
        self.beside: Callable[[], AbstractContextManager[object]] = nullcontext
        self.before_gather: Callable[[], None] = lambda: None

    def follow(self) -> None:
        """Start the last phase of the unfinished chain before any other collective.

        All ranks then start all phases in one order, whenever each of them waits.
        """
        if self._unfinished is not None:
            # The chain is forgotten first, so that no later collective starts a phase again that
            # failed.
            unfinished, self._unfinished = self._unfinished, None
            with self.beside():
                unfinished.begin_last()

    def chain(self, phases: Iterable[Phase]) -> Sequence[Waitable]:
        """Start the first of ``phases``. The others start on ``wait`` or before the next collective."""
        self.follow()
        chain = PhaseChain(phases)
        self._unfinished = chain
        return [chain]


@dataclass(eq=False)
class OrderedTransport:
    """The transports of ``unordered``. What they start is in order with the chains of ``order``, and recorded
    in ``channel``."""

    unordered: TransportSelector
    channel: CollectiveChannel
    order: CollectiveOrder


class PendingCollective:
    """A collective under way: ``wait`` blocks for its transfers, then runs its local part once.

    It starts after the unfinished chain of ``order``. Errors of the transport, at the start and at the end,
    are raised as ``RuntimeError`` naming ``label`` (what was moved) and the rank. ``on_end`` is called once,
    with the start of the wait and its seconds. ``recorded`` is the collective in the record of this rank,
    which names what the other ranks do instead.
    """

    def __init__(
        self,
        label: str,
        rank: int,
        recorded: tuple[FlightRecorder, RecordedCollective],
        order: CollectiveOrder,
        start: Callable[[], Sequence[Waitable]],
        finish: Callable[[], None] | None = None,
        on_end: Callable[[float, float], None] | None = None,
    ) -> None:
        self._label = label
        self._rank = rank
        self._recorder, self._call = recorded
        self._finish = finish
        self._on_end = on_end
        self._done = False
        self._error: BaseException | None = None
        try:
            order.follow()
            self._works = start()
        except Exception as error:
            self._raise_named(error)

    def wait(self) -> None:
        """Block until the result is complete. Later calls return, or raise again, immediately."""
        if self._error is not None:
            raise self._error
        if self._done:
            return
        began = time.perf_counter() if self._on_end is not None else 0.0
        try:
            before, self._recorder.waiting = self._recorder.waiting, self._call
            try:
                for work in self._works:
                    work.wait()
            finally:
                self._recorder.waiting = before
        except Exception as error:
            self._raise_named(error)
        if self._on_end is not None:
            self._on_end(began, time.perf_counter() - began)
        self._works = ()
        finish, self._finish = self._finish, None
        if finish is not None:
            try:
                finish()
            except BaseException as error:
                self._error = error
                raise
        self._done = True

    def _raise_named(self, error: Exception) -> NoReturn:
        try:
            if isinstance(error, MismatchedCollectivesError):
                raise error
            self._recorder.explain(self._call, error)
        except MismatchedCollectivesError as mismatch:
            self._error = mismatch
            raise
        self._error = RuntimeError(
            f"rank {self._rank}: {self._label} failed: {clause_of(error)}. A peer rank has died, or it "
            "runs other collectives than this one. Look at the first error on the other ranks. The limit is "
            "'timeout_seconds' in the configuration."
        )
        raise self._error from error
