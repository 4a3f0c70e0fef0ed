"""A record of the collectives that each rank has begun, to find ranks that make different ones."""

from __future__ import annotations

import contextlib
import gc
import json
import linecache
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

STALL_SECONDS = 1.0  # A rank that waits longer than this compares its record with those of the others.
_PATIENCE_SECONDS = 2.5  # The others may notice only when they have waited for STALL_SECONDS themselves.
_POLL_SECONDS = 0.05
_WATCH_SECONDS = STALL_SECONDS / 2
_EXIT_PATIENCE_SECONDS = 10.0
_RECENT = 16
_LIBRARIES = ("zero_ext", "torch")
_ADVICE = "Make the same calls in the same order on all ranks."


class MismatchedCollectivesError(RuntimeError):
    """Raised on all ranks when some of them make different collectives."""


class UnexpectedPayloadError(RuntimeError):
    """Raised by a transport that received another payload than this rank expects."""


class CollectiveChannel:
    """The collectives that ``ranks`` make over one transport, in order: how many, and the last of them."""

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.key = f"{name} of {','.join(map(str, ranks))}"
        # The number and label of each in one item: the thread that watches reads them while others append.
        self.recent: deque[tuple[int, str]] = deque(maxlen=_RECENT)

    @property
    def begun(self) -> int:
        """Return how many collectives this rank has begun."""
        return self.recent[-1][0] if self.recent else 0

    def begin(self, label: str, peers: Sequence[int] | None = None) -> RecordedCollective:
        """Record a collective that ends only after ``peers`` have begun it, by default all ranks."""
        number = self.begun + 1
        self.recent.append((number, label))
        return RecordedCollective(self, number, label, self.ranks if peers is None else peers)


class RecordedCollective(NamedTuple):
    """Collective number ``number`` of a channel, which waits for ``peers``."""

    channel: CollectiveChannel
    number: int
    label: str
    peers: Sequence[int]


class FlightRecorder:
    """Compares the collectives of this rank with those of the other ranks of one engine.

    Nothing is exchanged while collectives end in time. A rank that waits for longer than ``STALL_SECONDS``,
    or has an error of its transport, writes its record to ``store`` and reads those of the others. Without
    a store nothing is compared. A thread watches how long the rank waits, since a wait in gloo cannot be
    interrupted and goes on later. The thread calls ``abort``, which ends the wait with an error.

    Two ranks are known to be at different collectives, however slow the machine is, in two cases. Their
    records have different collectives at the same position. Or each waits in a collective that ends only
    after the other has begun it, which the other has not.
    """

    def __init__(self, rank: int, store: dist.Store | None) -> None:
        self.rank = rank
        self.waiting: RecordedCollective | None = None  # set while the host waits for it
        self.abort: Callable[[str], None] = lambda reason: None
        self._store = store
        self._channels: dict[str, CollectiveChannel] = {}
        self._failure: str | None = None
        self._published = ""
        self._lock = threading.Lock()
        if store is not None:
            _watch(self)

    def channel(self, name: str, ranks: Sequence[int]) -> CollectiveChannel:
        """Return the channel of ``ranks`` over the transport ``name``."""
        made = CollectiveChannel(name, ranks)
        return self._channels.setdefault(made.key, made)

    def stop(self) -> None:
        """Compare nothing from now on: this rank has aborted, and raises its own reason."""
        self._store = None

    def check(self) -> None:
        """Compare the records if this rank waits, as the watching thread does once it has waited for long.

        Raises:
            MismatchedCollectivesError: Some ranks are at different collectives.
        """
        call = self.waiting
        if call is not None:
            self._raise_mismatch(call, patience=0.0)

    def explain(self, call: RecordedCollective, error: Exception) -> None:
        """Compare the records after an ``error`` of the transport in ``call``. Raises as :meth:`check`."""
        self._raise_mismatch(call, _PATIENCE_SECONDS if isinstance(error, UnexpectedPayloadError) else 0.0)

    def _raise_mismatch(self, call: RecordedCollective, patience: float) -> None:
        # The thread that waits and the one that watches may both compare. The second raises the
        # text of the first, which the other ranks may have read by then.
        with self._lock:
            if self._failure is None:
                found = self._find_mismatch(call, patience)
                if found is None:
                    return
                self._failure = f"rank {self.rank}: {found}"
                # The record is published before the connections end. A peer that fails because of
                # their end then finds the reason in the store, unless the store has ended as well.
                with contextlib.suppress(RuntimeError, OSError):
                    self._publish(call)
        self.abort(self._failure)
        raise MismatchedCollectivesError(self._failure)

    def _find_mismatch(self, call: RecordedCollective, patience: float) -> str | None:
        if self._store is None:
            return None
        deadline = time.monotonic() + patience
        try:
            self._publish(call)
            while True:
                for rank in call.channel.ranks:
                    record = self._record_of(rank) if rank != self.rank else None
                    if record is not None and (found := self._compare(call, rank, record)) is not None:
                        return found
                if time.monotonic() >= deadline:
                    return None
                time.sleep(_POLL_SECONDS)
        except (RuntimeError, OSError):
            return None  # The process that serves the store has ended.

    def _publish(self, call: RecordedCollective) -> None:
        record = json.dumps(
            {
                "begun": {key: list(each.recent) for key, each in list(self._channels.items())},
                "waiting": [call.channel.key, call.number, call.label],
                "peers": list(call.peers),
                "location": _user_code_location(),
                "failure": self._failure,
            }
        )
        if self._store is not None and record != self._published:
            self._published = record
            self._store.set(str(self.rank), record)

    def _record_of(self, rank: int) -> dict[str, Any] | None:
        # ``get`` blocks until there is an entry, and a rank that never waits for long writes none.
        if self._store is None or not self._store.check([str(rank)]):
            return None
        record: dict[str, Any] = json.loads(self._store.get(str(rank)))
        return record

    def _compare(self, call: RecordedCollective, rank: int, record: dict[str, Any]) -> str | None:
        """Return how the record of ``rank`` contradicts this rank's, which is in ``call``."""
        key, number, label = record["waiting"]
        own_location, peer_location = _user_code_location(), record["location"]  # where the ranks wait now
        own, theirs = f"{call.label}{own_location}", f"{label}{peer_location}"
        recent: list[tuple[int, str]] = record["begun"].get(call.channel.key, [])
        begun = recent[-1][0] if recent else 0
        # Positions are compared first, since mutual waits and errors of peers may only follow from
        # a difference. A position that this rank has dropped, or has not reached, is no difference.
        mine = dict(call.channel.recent)
        for position, other in recent:
            if mine.get(position, other) != other:
                return _difference(f"{mine[position]}{own_location}", f"{other}{peer_location}", rank)
        channel = self._channels.get(key)
        behind = (0 if channel is None else channel.begun) < number
        waits = self.rank in record["peers"] and rank in call.peers
        if waits and behind and begun < call.number:
            return _difference(own, theirs, rank)
        if record["failure"] is not None:
            return f"{own}: expected an answer from rank {rank}, got its error: {record['failure']}"
        return None


def _difference(own: str, theirs: str, rank: int) -> str:
    return f"{own}: expected the same collective on all ranks, got {theirs} on rank {rank}. {_ADVICE}"


def _watch(recorder: FlightRecorder) -> None:
    """Start a thread that compares the records once this rank has waited in a collective for long."""
    ended = threading.Event()
    thread = threading.Thread(
        target=_check_waits, args=(weakref.ref(recorder), ended), name="zero_ext-recorder", daemon=True
    )
    # Also at interpreter exit: the thread must be out of the store by then.
    weakref.finalize(recorder, _end_watch, ended, thread)
    thread.start()


def _check_waits(recorder: weakref.ref[FlightRecorder], ended: threading.Event) -> None:
    call, since = None, 0.0
    while not ended.wait(_WATCH_SECONDS):
        alive = recorder()
        if alive is None:
            return
        if alive.waiting is not call:
            call, since = alive.waiting, time.monotonic()
        elif call is not None and time.monotonic() - since >= STALL_SECONDS:
            with contextlib.suppress(MismatchedCollectivesError):  # the thread that waits raises it
                alive.check()
        # A reference during the pause would keep the recorder alive forever, and the thread with
        # it.
        del alive


def _end_watch(ended: threading.Event, thread: threading.Thread) -> None:
    ended.set()
    # The watching thread may drop the last reference to the recorder, and cannot join itself.
    if thread is not threading.current_thread():
        thread.join(_EXIT_PATIENCE_SECONDS)


def _user_code_location() -> str:
    """Return the line of the user's code that leads here, as " (train.py:12: loss.backward())"."""
    frame: FrameType | None = sys._getframe()
    found = _innermost_outside(frame)
    if found is None:  # a thread of autograd, of a transport, or the one that watches
        found = _innermost_outside(_main_frame())
    if found is None:
        return ""
    path, line = found.f_code.co_filename, found.f_lineno
    text = linecache.getline(path, line).strip()
    return f" ({Path(path).name}:{line}{': ' if text else ''}{text})"


def _main_frame() -> FrameType | None:
    # Python 3.11 holds a lock while it lists the frames. A collection inside waits for it forever if it frees
    # a threading.local (CPython issue 106883).
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(threading.main_thread().ident or 0)
    finally:
        if collects:
            gc.enable()


def _innermost_outside(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _LIBRARIES and not module.startswith(("threading", "contextlib")):
            return frame
        frame = frame.f_back
    return None
