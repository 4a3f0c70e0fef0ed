"""Transports between the ranks of a group, and what each of them has from its all-to-all."""

from __future__ import annotations

import abc
import contextlib
import datetime
import zlib
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from zero_ext.config.internal_error import zero_ext_bug

SMALL_BYTES = 64 << 10  # Larger sums travel twice, in slices, so that a rank never holds all tensors.


class Waitable(Protocol):
    """A transfer under way (``torch.distributed.Work`` is one)."""

    def wait(self) -> object:
        """Block until the transfer is complete. Raises if it failed."""


class TransportSelector(Protocol):
    """Selects the transport of a tensor by its device. A :class:`Transport` selects itself."""

    rank: int
    world_size: int
    staging_bytes: int  # host memory that device tensors are moved through

    def for_tensor(self, tensor: torch.Tensor) -> Transport:
        """Return the transport that moves ``tensor``."""

    def abort(self, reason: str) -> None:
        """Abort all transports of this rank, see :meth:`Transport.abort`."""


class Transport(abc.ABC):
    """Moves flat tensors between the ``world_size`` ranks of a group.

    Results are valid only after ``wait``. No tensor that takes part is touched before. ``wait`` blocks the
    host for tensors in host memory, and the current stream for those on a device.

    All ranks make the same calls in the same order. ``tag`` (31 bits) names what is moved. Ranks at different
    calls get an error and not each other's data, if the transport can detect it.

    A transport implements :meth:`all_to_all` and :meth:`abort`. The other collectives are built from the
    all-to-all, and a backend that has them overrides them.
    """

    staging_bytes = 0
    # Gathers and sums go around the ranks, so that one rank per node sends to another node.
    rings = False

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    @abc.abstractmethod
    def all_to_all(
        self, receives: Sequence[torch.Tensor], sends: Sequence[torch.Tensor], tag: int = 0
    ) -> Sequence[Waitable]:
        """Send ``sends[r]`` to every other rank ``r``, and fill ``receives[r]`` with what it sends.

        Nothing is sent for empty tensors.
        """

    @abc.abstractmethod
    def abort(self, reason: str) -> None:
        """Abort this rank: transfers of other ranks with it fail, if possible before their time-out, and so
        does whatever it starts from now on."""

    def for_tensor(self, tensor: torch.Tensor) -> Transport:
        """Return this transport, see :class:`TransportSelector`."""
        return self

    def gather(self, flat: torch.Tensor, tag: int = 0) -> Sequence[Waitable]:
        """Fill ``flat`` [numel] with the slices [numel / N] of all ranks, in rank order. This rank's own
        slice is filled already."""
        slices = flat.chunk(self.world_size)
        return self.all_to_all(slices, [slices[self.rank]] * self.world_size, tag)

    def broadcast(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Sequence[Waitable]:
        """Copy a contiguous ``tensor`` from rank ``source`` to all ranks."""
        flat = tensor.view(-1)
        receives, sends = [flat[:0]] * self.world_size, [flat[:0]] * self.world_size
        if self.rank == source:
            sends = [flat] * self.world_size
        else:
            receives[source] = flat
        return self.all_to_all(receives, sends, tag)

    def all_reduce(self, tensor: torch.Tensor, tag: int = 0) -> Waitable:
        """Start an in-place sum of a small tensor over the ranks, in rank order."""
        return RankOrderSum(self, tensor, tag)

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor) -> Sequence[Waitable]:
        """Sum ``flat`` [numel] in its own dtype and in the backend's order, if this transport has ``rings``.
        This rank's slice of the sum goes to ``out`` [numel / N]."""
        raise zero_ext_bug(f"{type(self).__name__} sums nothing on the way: its rings is False")


class DeviceDispatch:
    """Selects ``host`` for tensors in host memory, and ``device`` for all others.

    Small agreements between the ranks are host tensors, so they never wait for the device.
    """

    def __init__(self, host: Transport, device: Transport) -> None:
        self.rank, self.world_size = host.rank, host.world_size
        self.staging_bytes = host.staging_bytes + device.staging_bytes
        self.host = host
        self.device = device

    def for_tensor(self, tensor: torch.Tensor) -> Transport:
        """Return the transport of the tensor's device."""
        return self.host if tensor.device.type == "cpu" else self.device

    def abort(self, reason: str) -> None:
        """Abort both transports. The host transport is first, since it notifies the peers."""
        self.host.abort(reason)
        self.device.abort(reason)


class SubgroupTransport(Transport):
    """The transport among ``ranks`` of ``parent``, over its connections. This rank is one of them.

    Every rank of ``parent`` belongs to one group of the same size and makes the same calls at the same time.
    So a backend with one order for all of its ranks serves the groups too. ``parent`` counts the staging
    bytes.
    """

    def __init__(self, parent: TransportSelector, ranks: Sequence[int]) -> None:
        super().__init__(ranks.index(parent.rank), len(ranks))
        self._ranks = ranks
        self._parent = parent

    def all_to_all(
        self, receives: Sequence[torch.Tensor], sends: Sequence[torch.Tensor], tag: int = 0
    ) -> Sequence[Waitable]:
        """Exchange tensors with the ranks of the group."""
        return all_to_all_among(self._parent, self._ranks, receives, sends, tag)

    def abort(self, reason: str) -> None:
        """Abort the parent."""
        self._parent.abort(reason)


def all_to_all_among(
    selector: TransportSelector,
    ranks: Sequence[int],
    receives: Sequence[torch.Tensor],
    sends: Sequence[torch.Tensor],
    tag: int = 0,
) -> Sequence[Waitable]:
    """Start an all-to-all among ``ranks`` only, with one tensor per rank, in the order of ``ranks``."""
    # All ranks take part, with empty entries for most others, so that a backend such as NCCL needs
    # no communicator for each group. An empty entry is a slice of a real one because the device of
    # the first entry selects the transport.
    empty = sends[0][:0]
    all_receives, all_sends = [empty] * selector.world_size, [empty] * selector.world_size
    for rank, receive, send in zip(ranks, receives, sends, strict=True):
        all_receives[rank], all_sends[rank] = receive, send
    return selector.for_tensor(empty).all_to_all(all_receives, all_sends, tag)


class RankOrderSum:
    """An in-place sum of ``tensor`` over the ranks of ``transport``, see :func:`sum_in_order`.

    gloo's all-reduce checks neither sizes nor tags. Ranks that call it for different tensors mix up their
    values or end the process. So each rank sends its values and every rank adds them up. For the few values
    that ranks agree on, this is faster than an all-reduce of several phases.
    """

    def __init__(self, transport: Transport, tensor: torch.Tensor, tag: int) -> None:
        self._transport = transport
        self._tensor = tensor
        self._tag = tag
        ranks, rank = transport.world_size, transport.rank
        values = tensor.detach().reshape(-1)
        self._numel = values.numel()
        self._sliced = values.nbytes > SMALL_BYTES
        self._works: Sequence[Waitable]
        if self._sliced:
            padded = values.new_zeros(ranks, -(-self._numel // ranks))
            padded.view(-1)[: self._numel] = values
            self._padded, self._table = padded, torch.empty_like(padded)
            self._table[rank] = padded[rank]
            self._works = transport.all_to_all(list(self._table), list(padded), tag)
        else:
            self._table = values.new_zeros(ranks, self._numel)
            self._table[rank] = values
            self._works = transport.gather(self._table.view(-1), tag)

    @torch.no_grad()
    def wait(self) -> None:
        """Block until the sum is in place."""
        for work in self._works:
            work.wait()
        total = sum_in_order(list(self._table))
        if self._sliced:
            self._padded[self._transport.rank] = total
            total = self._padded.view(-1)
            for work in self._transport.gather(total, self._tag):
                work.wait()
        self._tensor.copy_(total[: self._numel].view(self._tensor.shape))


def all_equal(total: int, squares: int, ranks: int) -> bool:
    """Return whether the integers of ``ranks`` ranks are equal, by their sum and the sum of their squares.

    They are equal exactly if the square of their sum is ``ranks`` times the sum of their squares, so a sum
    over the ranks compares them. Integers of 20 bits stay within int64.
    """
    return total * total == squares * ranks


def sum_in_order(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of ``tensors`` in order. Half precision adds up in float32 and is rounded once."""
    dtype = tensors[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    total = tensors[0].to(wide, copy=True)
    for other in tensors[1:]:
        total += other
    return total.to(dtype)


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
