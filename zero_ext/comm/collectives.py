"""Gather and reduce-scatter of flat buffers, summed in rank order and in float32.

gloo's own reduce-scatter is an all-reduce and a slice, and its all-gather copies twice, so both are built
from one exchange of shards; the local half of the reduction is one C++ pass
(:func:`zero_ext.ops.sum_shards_`).
"""

from __future__ import annotations

import zlib

import torch

from zero_ext import ops
from zero_ext.comm.exchange import Exchange, Message, Pending
from zero_ext.comm.wire import WireLog


class Collectives:
    """The collectives of one group of ``world_size`` ranks, counted in ``wire``.

    ``gathers`` and ``reductions`` are separate transports, so that the order of parameter gathers relative
    to gradient reductions need not agree between ranks; within each the order must agree.
    """

    def __init__(self, rank: int, world_size: int, gathers: Exchange, reductions: Exchange, wire: WireLog):
        self.rank = rank
        self.world_size = world_size
        self.wire = wire
        self._gathers = gathers
        self._reductions = reductions

    def _peers(self) -> list[int]:
        # Each rank starts with its right neighbour: no rank is everybody's first target.
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def gather(self, flat: torch.Tensor, shard: torch.Tensor, kind: str, label: str) -> Pending:
        """Fills ``flat`` [numel] with the shards [numel / N] of all ranks, in rank order.

        ``shard`` may be this rank's own slice of ``flat`` (in-place gather). Same dtype on both.
        """
        slices = flat.chunk(self.world_size)
        own = slices[self.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        sends: list[Message] = [(peer, own) for peer in self._peers()]
        receives: list[Message] = [(peer, slices[peer]) for peer in self._peers()]
        self.wire.record(kind, flat.numel(), shard.nbytes * len(sends))
        return Pending(label, self.rank, lambda: self._gathers.start(sends, receives, _tag(label)))

    def reduce_scatter(
        self,
        flat: torch.Tensor,
        out: torch.Tensor,
        received: torch.Tensor,
        accumulate: bool,
        kind: str,
        label: str,
    ) -> Pending:
        """Averages ``flat`` [numel] over the ranks; this rank's shard of it goes to ``out`` [numel / N].

        ``received`` [(N - 1) * numel / N] is scratch of ``flat``'s dtype, in use until ``wait`` returns.
        The sum runs in float32 and in rank order, so it does not depend on bucket or stage. ``accumulate``
        adds to ``out``; ``out`` may be this rank's own slice of ``flat`` if not accumulating.
        """
        slices = flat.chunk(self.world_size)
        peers = self._peers()
        landing = dict(zip(peers, received.chunk(len(peers)), strict=True))
        sends: list[Message] = [(peer, slices[peer]) for peer in peers]
        receives: list[Message] = list(landing.items())
        self.wire.record(kind, flat.numel(), out.numel() * flat.element_size() * len(sends))

        def finish() -> None:
            shards = [slices[rank] if rank == self.rank else landing[rank] for rank in range(self.world_size)]
            ops.sum_shards_(out, shards, 1.0 / self.world_size, accumulate)

        return Pending(label, self.rank, lambda: self._reductions.start(sends, receives, _tag(label)), finish)

    def sum_(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        """Sums a small tensor over the ranks in place, and returns it."""
        if self.world_size > 1:
            self.wire.record("scalars", tensor.numel(), tensor.nbytes)
            Pending(label, self.rank, lambda: [self._reductions.all_reduce(tensor)]).wait()
        return tensor

    def broadcast_(self, tensor: torch.Tensor, source: int, label: str) -> torch.Tensor:
        """Copies a contiguous ``tensor`` from rank ``source`` of the group to all ranks."""
        if self.world_size == 1:
            return tensor
        if self.rank == source:
            sends, receives = [(peer, tensor) for peer in self._peers()], []
        else:
            sends, receives = [], [(source, tensor)]
        self.wire.record("broadcast", tensor.numel(), tensor.nbytes * len(sends))
        Pending(label, self.rank, lambda: self._gathers.start(sends, receives, _tag(label))).wait()
        return tensor

    def give_up(self, reason: str) -> None:
        """Ends this rank's part in all collectives after an error of its own, so that the other ranks, which
        wait for it, fail with ``reason`` rather than by their time-out."""
        self._gathers.give_up(reason)
        self._reductions.give_up(reason)


def _tag(label: str) -> int:
    """What ranks at the same place agree on, so that units of equal size are not taken for each other."""
    return zlib.crc32(label.encode()) & 0x7FFFFFFF
