"""What collectives are made of: the protocol of a transport, and one built from send and receive."""

from __future__ import annotations

import abc
import contextlib
import datetime
import time
import zlib
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist

from zero_ext.comm.flight_recorder import FlightRecorder, MismatchedCollectivesError, RecordedCollective
from zero_ext.comm.sums import RankOrderSum

PeerPayload = tuple[int, torch.Tensor]  # rank within the group, contiguous tensor


class Waitable(Protocol):
    """What a transport returns: something to wait for (``torch.distributed.Work`` is one)."""

    def wait(self) -> object:
        """Blocks until the transfer is complete; raises if it failed."""


class Transport(Protocol):
    """Moves flat tensors between the ``world_size`` ranks of a group; what arrives is valid only after
    ``wait``, and nothing that takes part is touched before.

    All ranks make the same calls in the same order. ``tag`` (31 bits) names what is moved: ranks that are not
    at the same call get an error, where the transport can detect it, not each other's data. ``wait`` blocks
    the host for tensors in host memory, and the current stream for those on a device.
    """

    rank: int
    world_size: int
    staging_bytes: int  # host memory that it moves device tensors through

    def gather(self, flat: torch.Tensor, tag: int = 0) -> Sequence[Waitable]:
        """Fills ``flat`` [numel] with the slices [numel / N] of all ranks, in rank order; this rank's own is
        already in it."""

    def all_to_all(
        self, receives: Sequence[torch.Tensor], sends: Sequence[torch.Tensor], tag: int = 0
    ) -> Sequence[Waitable]:
        """Sends ``sends[r]`` to every rank ``r`` and fills ``receives[r]`` with what it sends; the entries of
        this rank itself are left alone, and nothing is sent for empty ones."""

    def broadcast(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Sequence[Waitable]:
        """Copies a contiguous ``tensor`` from rank ``source`` to all ranks."""

    def all_reduce(self, tensor: torch.Tensor) -> Waitable:
        """Begins an in-place sum of a small tensor over the group."""

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor) -> Sequence[Waitable] | None:
        """Sums ``flat`` [numel] over the ranks in its own dtype and an order of the transport's; this rank's
        slice of it goes to ``out`` [numel / N]. None where the transport adds nothing up on the way."""

    def rings(self, tensor: torch.Tensor) -> bool:
        """Return whether gathers and sums of tensors like this one go around the ranks, so that one rank per
        node sends to another node, and not every rank to every other."""

    def abort(self, reason: str) -> None:
        """Aborts this rank: the other ranks' transfers with it fail, where it can be without their
        time-out, and so does whatever it starts from now on."""


class PointToPointTransport(abc.ABC):
    """An :class:`Transport` made of sends and receives between pairs of ranks."""

    staging_bytes = 0

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    @abc.abstractmethod
    def start(
        self, sends: Sequence[PeerPayload], receives: Sequence[PeerPayload], tag: int = 0
    ) -> Sequence[Waitable]:
        """Begins all transfers; ``tag`` as in :class:`Transport`."""

    def all_reduce(self, tensor: torch.Tensor) -> Waitable:
        """Begin an in-place sum over the ranks, added up in rank order."""
        return RankOrderSum(self, tensor)

    @abc.abstractmethod
    def abort(self, reason: str) -> None:
        """See :class:`Transport`."""

    def _peers(self) -> list[int]:
        # Each rank starts with its right neighbour: no rank is everybody's first target.
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def gather(self, flat: torch.Tensor, tag: int = 0) -> Sequence[Waitable]:
        """See :class:`Transport`."""
        slices = flat.chunk(self.world_size)
        return self.all_to_all(slices, [slices[self.rank]] * self.world_size, tag)

    def all_to_all(
        self, receives: Sequence[torch.Tensor], sends: Sequence[torch.Tensor], tag: int = 0
    ) -> Sequence[Waitable]:
        """See :class:`Transport`."""
        peers = self._peers()
        outgoing = [(peer, sends[peer]) for peer in peers if sends[peer].numel()]
        incoming = [(peer, receives[peer]) for peer in peers if receives[peer].numel()]
        return self.start(outgoing, incoming, tag) if outgoing or incoming else ()

    def broadcast(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Sequence[Waitable]:
        """See :class:`Transport`."""
        if self.rank == source:
            return self.start([(peer, tensor) for peer in self._peers()], [], tag)
        return self.start([], [(source, tensor)], tag)

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor) -> Sequence[Waitable] | None:
        """See :class:`Transport`: none, each rank sums what it receives."""
        return None

    def rings(self, tensor: torch.Tensor) -> bool:
        """See :class:`Transport`."""
        return False


class ProcessGroupTransport(PointToPointTransport):
    """Transport over a process group or backend that has send and receive (gloo), for its use alone."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._connections: dist.ProcessGroup | None = group
        self._reason = ""

    @property
    def _group(self) -> dist.ProcessGroup:
        if self._connections is None:
            raise RuntimeError(self._reason)
        return self._connections

    def start(
        self, sends: Sequence[PeerPayload], receives: Sequence[PeerPayload], tag: int = 0
    ) -> Sequence[Waitable]:
        """See :class:`PointToPointTransport`. Receives start first, so that data finds its destination."""
        works = [self._group.recv([tensor], rank, _slot(tag, tensor)) for rank, tensor in receives]
        works += [self._group.send([tensor], rank, _slot(tag, tensor)) for rank, tensor in sends]
        return works

    def abort(self, reason: str) -> None:
        """See :class:`Transport`: all connections close, and the transfers under way fail on all ranks."""
        group, self._connections, self._reason = self._connections, None, reason
        if group is None:
            return
        # gloo has no call that ends transfers. It closes all connections of a group once a wait times out.
        with contextlib.suppress(RuntimeError):
            never = torch.empty(1, dtype=torch.uint8, device="cpu")
            group.recv([never], self._peers()[0], _slot(0, never)).wait(datetime.timedelta(milliseconds=1))


def _slot(tag: int, tensor: torch.Tensor) -> int:
    """Return the tag of ``tensor`` for gloo, which ends the process over a payload of another size: one with
    another tag it only never matches."""
    return zlib.crc32(tensor.nbytes.to_bytes(8, "little"), tag) & 0x7FFFFFFF


class PendingCollective:
    """A collective under way: ``wait`` blocks for its transfers, then runs its local part once.

    Errors of the transport, when it starts and when it ends, are raised as ``RuntimeError`` naming ``label``
    (what was moved) and the rank. ``waited`` is called once, with the start of the wait and its seconds.
    ``recorded`` is the collective in the record of this rank, which names what the other ranks do instead.
    """

    def __init__(
        self,
        label: str,
        rank: int,
        start: Callable[[], Sequence[Waitable]],
        finish: Callable[[], None] | None = None,
        waited: Callable[[float, float], None] | None = None,
        recorded: tuple[FlightRecorder, RecordedCollective] | None = None,
    ) -> None:
        self._recorded = recorded
        self._label = label
        self._rank = rank
        self._finish = finish
        self._waited = waited
        self._done = False
        self._error: RuntimeError | None = None
        try:
            self._works = start()
        except Exception as error:
            self._raise_named(error)

    def wait(self) -> None:
        """Blocks until the result is in place; later calls return, or raise again, at once."""
        if self._error is not None:
            raise self._error
        if self._done:
            return
        began = time.perf_counter() if self._waited is not None else 0.0
        try:
            self._await_works()
        except Exception as error:
            self._raise_named(error)
        if self._waited is not None:
            self._waited(began, time.perf_counter() - began)
        self._done = True
        self._works = ()
        if self._finish is not None:
            self._finish()
            self._finish = None

    def _await_works(self) -> None:
        if self._recorded is None:
            for work in self._works:
                work.wait()
            return
        recorder, call = self._recorded
        before, recorder.waiting = recorder.waiting, call
        try:
            for work in self._works:
                work.wait()
        finally:
            recorder.waiting = before

    def _raise_named(self, error: Exception) -> NoReturn:
        try:
            if isinstance(error, MismatchedCollectivesError):
                raise error
            if self._recorded is not None:
                recorder, call = self._recorded
                recorder.explain(call, error)
        except MismatchedCollectivesError as mismatch:
            self._error = mismatch
            raise
        self._error = RuntimeError(
            f"rank {self._rank}: {self._label} failed: {error}. A peer rank has died, or it runs other "
            "collectives than this one; look at the first error on the other ranks. The limit is "
            "'timeout_seconds' in the configuration."
        )
        raise self._error from error
