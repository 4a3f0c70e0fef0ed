"""Collectives of several hops on one transport, in the order in which they were started."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from zero_ext.comm.transport import Exchange, Waitable

Hop = Callable[[], Sequence[Waitable]]  # computes what is sent, if that is to be done, and begins to send it


class Chain:
    """Hops one after the other, each begun when the one before has ended."""

    def __init__(self, hops: Iterable[Hop]) -> None:
        self._left = deque(hops)
        self._works = self._left.popleft()()

    def begin_last(self) -> None:
        """Waits for every hop but the last, and begins that one."""
        while self._left:
            for work in self._works:
                work.wait()
            self._works = self._left.popleft()()

    def wait(self) -> None:
        """See :class:`Waitable`."""
        self.begin_last()
        for work in self._works:
            work.wait()


class Order:
    """What several exchanges over the same connections know of each other: the chain that has hops left.

    ``beside`` gives the stream in which a chain goes on when something else is to begin, so that the stream
    of that need not wait for the chain's hops.
    """

    def __init__(self) -> None:
        self._unfinished: Chain | None = None
        self.beside: Callable[[], AbstractContextManager[object]] = nullcontext
        self.before_gather: Callable[[], None] = lambda: None

    def follow(self) -> None:
        """Before anything else is begun: the last hop of the chain is, so that all ranks begin all hops in
        one order, whenever each of them waits."""
        if self._unfinished is not None:
            unfinished, self._unfinished = self._unfinished, None
            with self.beside():
                unfinished.begin_last()

    def chain(self, hops: Iterable[Hop]) -> Sequence[Waitable]:
        """Begins the first of ``hops``; the others follow when it is waited for, or something else begins."""
        self.follow()
        chain = Chain(hops)
        self._unfinished = chain
        return [chain]


class OrderedExchange:
    """``exchange``, what it begins in order with the chains of ``order``; see :class:`Exchange`."""

    def __init__(self, exchange: Exchange, order: Order | None = None) -> None:
        self.rank = exchange.rank
        self.world_size = exchange.world_size
        self.staging_bytes = exchange.staging_bytes
        self.unordered = exchange  # for the hops of a chain
        self.order = order or Order()

    def chain(self, hops: Iterable[Hop]) -> Sequence[Waitable]:
        """See :meth:`Order.chain`; the hops use ``unordered``."""
        return self.order.chain(hops)

    def gather(self, flat: torch.Tensor, tag: int = 0) -> Sequence[Waitable]:
        """See :class:`Exchange`."""
        self.order.follow()
        return self.unordered.gather(flat, tag)

    def all_to_all(
        self, receives: Sequence[torch.Tensor], sends: Sequence[torch.Tensor], tag: int = 0
    ) -> Sequence[Waitable]:
        """See :class:`Exchange`."""
        self.order.follow()
        return self.unordered.all_to_all(receives, sends, tag)

    def broadcast(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Sequence[Waitable]:
        """See :class:`Exchange`."""
        self.order.follow()
        return self.unordered.broadcast(tensor, source, tag)

    def all_reduce(self, tensor: torch.Tensor) -> Waitable:
        """See :class:`Exchange`."""
        self.order.follow()
        return self.unordered.all_reduce(tensor)

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor) -> Sequence[Waitable] | None:
        """See :class:`Exchange`."""
        self.order.follow()
        return self.unordered.reduce_scatter(flat, out)

    def rings(self, tensor: torch.Tensor) -> bool:
        """See :class:`Exchange`."""
        return self.unordered.rings(tensor)

    def give_up(self, reason: str) -> None:
        """See :class:`Exchange`."""
        self.unordered.give_up(reason)
