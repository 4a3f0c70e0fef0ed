"""Run collectives of several phases on one transport in the order in which they were started."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from zero_ext.comm.transport import Transport, Waitable

Phase = Callable[
    [], Sequence[Waitable]
]  # computes what is sent, if that is to be done, and begins to send it


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
        """See :class:`Waitable`."""
        self.begin_last()
        for work in self._works:
            work.wait()


class CollectiveOrder:
    """The order of collectives of several transports that share connections.

    It remembers the chain whose last phase has not started. ``beside`` enters the stream in which that chain
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
            unfinished, self._unfinished = self._unfinished, None
            with self.beside():
                unfinished.begin_last()

    def chain(self, phases: Iterable[Phase]) -> Sequence[Waitable]:
        """Start the first of ``phases``. The others start on ``wait`` or before the next collective."""
        self.follow()
        chain = PhaseChain(phases)
        self._unfinished = chain
        return [chain]


class OrderedTransport:
    """A :class:`Transport` that starts everything on ``transport`` in order with the chains of ``order``."""

    def __init__(self, transport: Transport, order: CollectiveOrder | None = None) -> None:
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.staging_bytes = transport.staging_bytes
        self.unordered = transport  # for the phases of a chain
        self.order = order or CollectiveOrder()

    def chain(self, phases: Iterable[Phase]) -> Sequence[Waitable]:
        """See :meth:`CollectiveOrder.chain`; the phases use ``unordered``."""
        return self.order.chain(phases)

    def gather(self, flat: torch.Tensor, tag: int = 0) -> Sequence[Waitable]:
        """See :class:`Transport`."""
        self.order.follow()
        return self.unordered.gather(flat, tag)

    def all_to_all(
        self, receives: Sequence[torch.Tensor], sends: Sequence[torch.Tensor], tag: int = 0
    ) -> Sequence[Waitable]:
        """See :class:`Transport`."""
        self.order.follow()
        return self.unordered.all_to_all(receives, sends, tag)

    def broadcast(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Sequence[Waitable]:
        """See :class:`Transport`."""
        self.order.follow()
        return self.unordered.broadcast(tensor, source, tag)

    def all_reduce(self, tensor: torch.Tensor) -> Waitable:
        """See :class:`Transport`."""
        self.order.follow()
        return self.unordered.all_reduce(tensor)

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor) -> Sequence[Waitable] | None:
        """See :class:`Transport`."""
        self.order.follow()
        return self.unordered.reduce_scatter(flat, out)

    def rings(self, tensor: torch.Tensor) -> bool:
        """See :class:`Transport`."""
        return self.unordered.rings(tensor)

    def abort(self, reason: str) -> None:
        """See :class:`Transport`."""
        self.unordered.abort(reason)
