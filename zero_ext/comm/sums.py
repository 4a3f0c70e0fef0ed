"""Sums over the ranks, built from transfers that check what they receive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from zero_ext.comm.transport import Transport, Waitable

SMALL_BYTES = 64 << 10  # Larger tensors travel twice, in slices, so that a rank never holds all of them.


def sum_in_order(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of ``parts``, from the first one on; half-precision numbers add up in float32 and are
    rounded once."""
    dtype = tensors[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    total = tensors[0].to(wide, copy=True)
    for other in tensors[1:]:
        total += other
    return total.to(dtype)


class RankOrderSum:
    """An in-place sum of ``tensor`` over the ranks of ``transport``, see :func:`sum_in_order`.

    gloo's all-reduce checks neither sizes nor tags. Ranks that call it for different tensors mix up their
    values or end the process. So each rank sends its values and every rank adds them up. For the few values
    that ranks agree on, this is faster than an all-reduce of several phases.
    """

    def __init__(self, transport: Transport, tensor: torch.Tensor, tag: int = 0) -> None:
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
