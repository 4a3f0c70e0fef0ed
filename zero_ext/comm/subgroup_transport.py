"""Transport among some of a transport's ranks, while the others do the same in groups of theirs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_ext.comm.hierarchical import all_to_all_among
from zero_ext.comm.sums import RankOrderSum
from zero_ext.comm.transport import Transport, Waitable


class SubgroupTransport:
    """The :class:`Transport` of ``ranks`` over ``whole``'s connections; this rank is one of them.

    Every rank of ``whole`` belongs to one group of the same size and makes the same calls at the same time,
    so that a backend with one order for all of its ranks serves the groups too.
    """

    staging_bytes = 0  # counted by the parent

    def __init__(self, parent: Transport, ranks: Sequence[int]) -> None:
        self.rank = ranks.index(parent.rank)
        self.world_size = len(ranks)
        self._parent = parent
        self._ranks = ranks

    def gather(self, flat: torch.Tensor, tag: int = 0) -> Sequence[Waitable]:
        """See :class:`Transport`."""
        slices = flat.chunk(self.world_size)
        return self.all_to_all(slices, [slices[self.rank]] * self.world_size, tag)

    def all_to_all(
        self, receives: Sequence[torch.Tensor], sends: Sequence[torch.Tensor], tag: int = 0
    ) -> Sequence[Waitable]:
        """See :class:`Transport`."""
        return all_to_all_among(self._parent, self._ranks, receives, sends, tag)

    def broadcast(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Sequence[Waitable]:
        """See :class:`Transport`."""
        empty = tensor[:0]
        receives, sends = [empty] * self.world_size, [empty] * self.world_size
        if self.rank == source:
            sends = [tensor] * self.world_size
        else:
            receives[source] = tensor
        return self.all_to_all(receives, sends, tag)

    def all_reduce(self, tensor: torch.Tensor) -> Waitable:
        """See :class:`Transport`: added up in rank order."""
        return RankOrderSum(self, tensor)

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor) -> Sequence[Waitable] | None:
        """See :class:`Transport`: none, each rank sums what it receives."""
        return None

    def rings(self, tensor: torch.Tensor) -> bool:
        """See :class:`Transport`: no, whatever it does is an all-to-all."""
        return False

    def abort(self, reason: str) -> None:
        """See :class:`Transport`; aborts the parent."""
        self._parent.abort(reason)
