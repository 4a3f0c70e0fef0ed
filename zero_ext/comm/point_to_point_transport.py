"""Transports built from sends and receives between pairs of ranks."""

from __future__ import annotations

import abc
import contextlib
import datetime
import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from zero_ext.comm.transport import Transport, Waitable

PeerPayload = tuple[int, torch.Tensor]  # rank within the group, contiguous tensor


class PointToPointTransport(Transport):
    """A transport with a :meth:`start` that sends to and receives from single ranks."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        # Each rank starts with its right neighbor: no rank is everybody's first target.
        self._peers = [(rank + step) % world_size for step in range(1, world_size)]

    @abc.abstractmethod
    def start(
        self, sends: Sequence[PeerPayload], receives: Sequence[PeerPayload], tag: int = 0
    ) -> Sequence[Waitable]:
        """Start all transfers, empty ones too. ``tag`` as in :class:`Transport`."""

    def all_to_all(
        self, receives: Sequence[torch.Tensor], sends: Sequence[torch.Tensor], tag: int = 0
    ) -> Sequence[Waitable]:
        """Start the transfers that are not empty."""
        outgoing = [(peer, sends[peer]) for peer in self._peers if sends[peer].numel()]
        incoming = [(peer, receives[peer]) for peer in self._peers if receives[peer].numel()]
        return self.start(outgoing, incoming, tag) if outgoing or incoming else ()

    def broadcast(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Sequence[Waitable]:
        """Send ``tensor`` from ``source`` to each rank, even if it is empty."""
        if self.rank == source:
            return self.start([(peer, tensor) for peer in self._peers], [], tag)
        return self.start([], [(source, tensor)], tag)


class ProcessGroupTransport(PointToPointTransport):
    """Transport over a process group or backend that has send and receive (gloo), for its use alone."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._connections: dist.ProcessGroup | None = group
        self._reason = ""

    def start(
        self, sends: Sequence[PeerPayload], receives: Sequence[PeerPayload], tag: int = 0
    ) -> Sequence[Waitable]:
        """Start the receives and then the sends, so that data finds its destination."""
        group = self._connections
        if group is None:
            raise RuntimeError(self._reason)
        works = [group.recv([tensor], rank, _slot(tag, tensor)) for rank, tensor in receives]
        works += [group.send([tensor], rank, _slot(tag, tensor)) for rank, tensor in sends]
        return works

    def abort(self, reason: str) -> None:
        """Close all connections. The transfers under way fail on all ranks."""
        group, self._connections, self._reason = self._connections, None, reason
        if group is None:
            return
        # gloo has no call that ends transfers. It closes all connections of a group once a wait times out.
        with contextlib.suppress(RuntimeError):
            never = torch.empty(1, dtype=torch.uint8, device="cpu")
            group.recv([never], self._peers[0], _slot(0, never)).wait(datetime.timedelta(milliseconds=1))


def _slot(tag: int, tensor: torch.Tensor) -> int:
    """Return the tag of ``tensor`` for gloo, which ends the process over a payload of another size: one with
    another tag it only never matches."""
    return zlib.crc32(tensor.nbytes.to_bytes(8, "little"), tag) & 0x7FFFFFFF
