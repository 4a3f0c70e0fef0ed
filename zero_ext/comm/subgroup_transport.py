"""Exchange among some of a transport's ranks, while the others do the same in groups of theirs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_ext.comm.hierarchical import exchange_among
from zero_ext.comm.sums import RankOrderSum
from zero_ext.comm.transport import Exchange, Waitable


class SubsetExchange:
    """The :class:`Exchange` of ``ranks`` over ``whole``'s connections; this rank is one of them.

    Every rank of ``whole`` belongs to one group of the same size and makes the same calls at the same time,
    so that a backend with one order for all of its ranks serves the groups too.
    """

    staging_bytes = 0  # the whole's

    def __init__(self, whole: Exchange, ranks: Sequence[int]) -> None:
        self.rank = ranks.index(whole.rank)
        self.world_size = len(ranks)
        self._whole = whole
        self._ranks = ranks

    def gather(self, flat: torch.Tensor, tag: int = 0) -> Sequence[Waitable]:
        """See :class:`Exchange`."""
        slices = flat.chunk(self.world_size)
        return self.all_to_all(slices, [slices[self.rank]] * self.world_size, tag)

    def all_to_all(
        self, receives: Sequence[torch.Tensor], sends: Sequence[torch.Tensor], tag: int = 0
    ) -> Sequence[Waitable]:
        """See :class:`Exchange`."""
        return exchange_among(self._whole, self._ranks, receives, sends, tag)

    def broadcast(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Sequence[Waitable]:
        """See :class:`Exchange`."""
        empty = tensor[:0]
        receives, sends = [empty] * self.world_size, [empty] * self.world_size
        if self.rank == source:
            sends = [tensor] * self.world_size
        else:
            receives[source] = tensor
        return self.all_to_all(receives, sends, tag)

    def all_reduce(self, tensor: torch.Tensor) -> Waitable:
        """See :class:`Exchange`: added up in rank order."""
        return RankOrderSum(self, tensor)

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor) -> Sequence[Waitable] | None:
        """See :class:`Exchange`: none, a sum is made where its parts arrive."""
        return None

    def rings(self, tensor: torch.Tensor) -> bool:
        """See :class:`Exchange`: no, whatever it does is an all-to-all."""
        return False

    def give_up(self, reason: str) -> None:
        """See :class:`Exchange`; for the whole."""
        self._whole.give_up(reason)
