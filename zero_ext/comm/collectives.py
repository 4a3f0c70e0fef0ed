"""Gather and reduce-scatter of flat buffers, summed in rank order and in float32.

gloo's own reduce-scatter is an all-reduce and a slice, NCCL's adds up in the dtype on the wire and in an
order of its own. So ranks exchange shards instead, and each adds those of its part in one pass
(:func:`zero_ext.ops.sum_shards_`).
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence

import torch

from zero_ext import ops
from zero_ext.comm.exchange import Exchange, Pending, Waitable
from zero_ext.comm.wire import WireLog
from zero_ext.config.events import Bus, CollectiveEnd


class Collectives:
    """The collectives of one group of ``world_size`` ranks, counted in ``wire``, on tensors of the host or of
    the device that ``gathers`` and ``reductions`` serve.

    These are separate transports, so that the order of parameter gathers relative to gradient reductions need
    not agree between ranks; within each the order must agree. Whoever listens to ``bus`` hears of the end of
    each.
    """

    def __init__(self, rank: int, world_size: int, gathers: Exchange, reductions: Exchange, wire: WireLog):
        self.rank = rank
        self.world_size = world_size
        self.wire = wire
        self.bus = Bus()
        self._gathers = gathers
        self._reductions = reductions

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory that device tensors go through between the ranks."""
        return self._gathers.staging_bytes + self._reductions.staging_bytes

    def gather(
        self, flat: torch.Tensor, shard: torch.Tensor, kind: str, label: str, may_be_nan: bool = False
    ) -> Pending:
        """Fills ``flat`` [numel] with the shards [numel / N] of all ranks, in rank order.

        ``shard`` may be this rank's own slice of ``flat`` (in-place gather). Same dtype on both. Gradients
        ``may_be_nan``: they go where gradients are reduced, which nobody checks, in the order of reductions.
        """
        slices = flat.chunk(self.world_size)
        own = slices[self.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        told = self._record(kind, label, flat.numel(), shard.nbytes * (self.world_size - 1))
        way = self._reductions if may_be_nan else self._gathers
        return Pending(label, self.rank, lambda: way.gather(flat, _tag(label)), waited=told)

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
        The sum runs in float32 and in rank order, so it does not depend on bucket or stage, unless the
        transport was made to add up on the way. ``accumulate`` adds to ``out``; ``out`` may be this rank's
        own slice of ``flat`` if not accumulating.
        """
        sent = out.numel() * flat.element_size() * (self.world_size - 1)
        told = self._record(kind, label, flat.numel(), sent)
        slices = list(flat.chunk(self.world_size))
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        landing = dict(zip(others, received.chunk(len(others)), strict=True))
        shards: list[torch.Tensor] = []

        def start() -> Sequence[Waitable]:
            total = received[: out.numel()]
            works = self._reductions.reduce_scatter(flat, total)
            if works is not None:
                shards.append(total)
                return works
            shards.extend(landing.get(rank, slices[rank]) for rank in range(self.world_size))
            return self._reductions.all_to_all(shards, slices, _tag(label))

        def finish() -> None:
            ops.sum_shards_(out, shards, 1.0 / self.world_size, accumulate)

        return Pending(label, self.rank, start, finish, told)

    def sum_(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        """Sums a small tensor over the ranks in place, and returns it."""
        if self.world_size > 1:
            told = self._record("scalars", label, tensor.numel(), tensor.nbytes)
            Pending(label, self.rank, lambda: [self._reductions.all_reduce(tensor)], waited=told).wait()
        return tensor

    def broadcast_(self, tensor: torch.Tensor, source: int, label: str) -> torch.Tensor:
        """Copies a contiguous ``tensor`` from rank ``source`` of the group to all ranks."""
        if self.world_size == 1:
            return tensor
        sent = tensor.nbytes * (self.world_size - 1) if self.rank == source else 0
        told = self._record("broadcast", label, tensor.numel(), sent)
        start = functools.partial(self._gathers.broadcast, tensor, source, _tag(label))
        Pending(label, self.rank, start, waited=told).wait()
        return tensor

    def give_up(self, reason: str) -> None:
        """Ends this rank's part in all collectives after an error of its own, so that the other ranks, which
        wait for it, fail with ``reason`` rather than by their time-out."""
        self._gathers.give_up(reason)
        self._reductions.give_up(reason)

    def _record(
        self, kind: str, label: str, elements: int, bytes_sent: int
    ) -> Callable[[float, float], None] | None:
        """Counts a collective; returns what tells of its end, if anybody listens."""
        self.wire.record(kind, elements, bytes_sent)
        if not self.bus or self.world_size == 1:
            return None
        ranks, bus = self.world_size, self.bus

        def told(began: float, seconds: float) -> None:
            bus.publish(CollectiveEnd(kind, label, ranks, elements, bytes_sent, began, seconds))

        return told


def _tag(label: str) -> int:
    """What ranks at the same place agree on, so that units of equal size are not taken for each other."""
    return zlib.crc32(label.encode()) & 0x7FFFFFFF
