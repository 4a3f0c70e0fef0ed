"""Exchange between the ranks of one host without a socket: one copy from process to process."""

from __future__ import annotations

import time
import uuid
import weakref
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from zero_ext import ops
from zero_ext.comm.exchange import GroupExchange, Message, PointToPoint, Waitable
from zero_ext.comm.flight_recorder import STALL_SECONDS, FlightRecorder, UnexpectedMessage

_UNEXPECTED = (" bytes where ", " sent something else in its place")  # of ops.host_exchange_wait, too
_NO_ANSWER = "no answer from rank"  # how the error of ops.host_exchange_wait begins when its time is over


class HostExchange(PointToPoint):
    """Sends and receives through ``ops.host_exchange_*``. Ranks that fall back together use ``group``."""

    def __init__(self, handle: int, group: GroupExchange, timeout_seconds: float) -> None:
        super().__init__(group.rank, group.world_size)
        self._handle = handle
        self._group = group
        self._timeout_seconds = timeout_seconds
        self._started: Counter[tuple[int, bool]] = Counter()
        # Also at interpreter exit: the thread behind the handle must have ended by then.
        weakref.finalize(self, ops.host_exchange_close, handle)

    def start(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int = 0
    ) -> Sequence[Waitable]:
        """See :class:`PointToPoint`."""
        for rank, tensor in sends:
            ops.host_exchange_send(self._handle, rank, tensor, tag)
        for rank, tensor in receives:
            ops.host_exchange_receive(self._handle, rank, tensor, tag)
        return [self._transfer(rank, True) for rank, _ in receives] + [
            self._transfer(rank, False) for rank, _ in sends
        ]

    def give_up(self, reason: str) -> None:
        """See :class:`Exchange`: peers raise ``reason`` itself."""
        ops.host_exchange_give_up(self._handle, reason)
        self._group.give_up(reason)

    def _transfer(self, rank: int, receiving: bool) -> Waitable:
        self._started[rank, receiving] += 1
        count = self._started[rank, receiving]
        return _Transfer((self._handle, rank, count, receiving), self._timeout_seconds, self.recorder)


class _Transfer:
    def __init__(
        self,
        message: tuple[int, int, int, bool],
        timeout_seconds: float,
        recorder: FlightRecorder | None,
    ) -> None:
        self._message = message
        self._timeout_seconds = timeout_seconds
        self._recorder = recorder

    def wait(self) -> None:
        """Blocks until this message and those before it in its direction are complete."""
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            seconds = min(STALL_SECONDS, max(0.0, deadline - time.monotonic()))
            try:
                ops.host_exchange_wait(*self._message, seconds)
                return
            except RuntimeError as error:
                if any(text in str(error) for text in _UNEXPECTED):
                    raise UnexpectedMessage(str(error)) from None
                if not str(error).startswith(_NO_ANSWER):
                    raise
                if time.monotonic() >= deadline:
                    rank = self._message[1]
                    raise RuntimeError(
                        f"no answer from rank {rank} within {self._timeout_seconds:g} seconds"
                    ) from None
            if self._recorder is not None:
                self._recorder.check()


def fastest_exchange(group: dist.ProcessGroup, timeout_seconds: float) -> PointToPoint:
    """A :class:`HostExchange` if all ranks of ``group`` share a host and may read each other's memory (the
    kernel's ptrace rules), else a :class:`GroupExchange`; a collective, all ranks choose alike."""
    through_group = GroupExchange(group)
    rank, world_size = through_group.rank, through_group.world_size
    token = torch.tensor([uuid.uuid4().int >> 65 if rank == 0 else 0], dtype=torch.int64, device="cpu")
    through_group.all_reduce(token).wait()
    name = f"/zero_ext-{int(token):x}"
    handle: int | None = None
    if rank == 0:
        handle = _try_open(name, rank, world_size)
    if _all(through_group, rank != 0 or handle is not None) and rank != 0:
        handle = _try_open(name, rank, world_size)
    joined = _all(through_group, handle is not None)
    if rank == 0:
        ops.host_exchange_unlink(name)
    if _all(through_group, joined and handle is not None and ops.host_exchange_connect(handle)):
        if handle is None:
            raise AssertionError("all ranks have joined, but this one has no handle")
        return HostExchange(handle, through_group, timeout_seconds)
    if handle is not None:
        ops.host_exchange_close(handle)
    return through_group


def _try_open(name: str, rank: int, world_size: int) -> int | None:
    handle = uuid.uuid4().int >> 65
    try:
        ops.host_exchange_open(handle, name, rank, world_size, rank == 0)
    except RuntimeError:
        return None
    return handle


def _all(group: GroupExchange, mine: bool) -> bool:
    refusals = torch.tensor([int(not mine)], dtype=torch.int64, device="cpu")
    group.all_reduce(refusals).wait()
    return int(refusals) == 0
