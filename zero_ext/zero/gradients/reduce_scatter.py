"""Reduce-scatter of a unit's gradients: each rank gets its shard of the average over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from zero_ext import ops
from zero_ext.comm import Collectives, CollectiveTraffic, PendingCollective, TransportSelector
from zero_ext.comm.hierarchical import in_rank_order
from zero_ext.comm.pending_collective import Phase
from zero_ext.comm.transport import Waitable, all_to_all_among
from zero_ext.config import ZeroConfig
from zero_ext.zero.construction.grouping import DTYPES
from zero_ext.zero.memory.pool_plan import Purpose
from zero_ext.zero.units.param_gather import format_of
from zero_ext.zero.units.unit import Unit

# Memory of a number of elements, until the reduction has ended.
Borrow = Callable[[int, torch.dtype, Purpose], torch.Tensor]


class GradientReduceScatter:
    """Averages the gradient of one unit. Sends it in ``dtype``, or in its own precision without one."""

    def __init__(self, unit: Unit, dtype: torch.dtype | None = None) -> None:
        self._unit, self._dtype = unit, dtype
        self._kind = unit.traffic_kind("reduce_scatter")
        self._label = f"reduce-scatter of the gradients of {unit.describe()}"

    def start(
        self, local: torch.Tensor, out: torch.Tensor, accumulate: bool, borrow: Borrow
    ) -> PendingCollective:
        """Begin to average ``local`` [layout.numel] over the ranks. This rank's shard is written to ``out``
        [layout.shard_numel], or added to it. With sharded gradients ``local`` may be overwritten."""
        payload, collectives = self._payload(local, borrow), self._unit.collectives
        shards = 1 if collectives.reduction == "backend" else collectives.world_size - 1
        received = borrow(out.numel() * shards, payload.dtype, "received")
        return collectives.reduce_scatter(payload, out, received, accumulate, self._kind, self._label)

    def _payload(self, local: torch.Tensor, borrow: Borrow) -> torch.Tensor:
        if self._dtype in (None, local.dtype):
            return local
        payload = borrow(local.numel(), self._dtype, "sent")
        ops.pack_(payload, [local], [0])
        return payload


class NodeOrderedReduceScatter(GradientReduceScatter):
    """Averages inside each node, then over the nodes, in the order of the ranks and of the nodes. Both sums
    run in float32. The first is rounded to the communication precision.

    A rank receives its neighbors' slices for all ranks with its local rank, and exchanges the sums with these
    ranks. So of S bytes each rank sends S / G * (M - 1) / M to the M - 1 other nodes of G ranks. A ring over
    all N = G * M ranks sends S * (N - 1) / N out of each node: S / G * (N - 1) / N per rank.
    """

    def start(
        self, local: torch.Tensor, out: torch.Tensor, accumulate: bool, borrow: Borrow
    ) -> PendingCollective:
        collectives, numel = self._unit.collectives, out.numel()
        nodes = collectives.nodes
        local_ranks, count = nodes.ranks_per_node, nodes.nodes
        dtype = self._dtype or local.dtype
        sent = borrow(local.numel(), dtype, "sent")
        # The slices of the ranks with one local rank in all nodes become contiguous.
        sent.view(local_ranks, count, numel).copy_(local.view(count, local_ranks, numel).transpose(0, 1))
        blocks = list(sent.chunk(local_ranks))
        # ``spare`` is sent in the first phase. That phase has ended before the second one receives into it.
        own, spare = blocks[nodes.local_rank], blocks[(nodes.local_rank + 1) % local_ranks]
        # The gradient has been copied, so its memory takes what the neighbors send, if that fits.
        fits = dtype.itemsize <= local.dtype.itemsize
        received = local.view(dtype) if fits else borrow(local.numel(), dtype, "received")
        in_order = in_rank_order(own, nodes.local_rank, local_ranks, received)
        slices = list(own.chunk(count))
        averages = in_rank_order(slices[nodes.node], nodes.node, count, spare)

        def phases(selector: TransportSelector, tag: int) -> Sequence[Phase]:
            def between() -> Sequence[Waitable]:
                ops.sum_shards_(own, in_order, 1.0 / local_ranks, False)
                return all_to_all_among(selector, nodes.counterparts, averages, slices, tag)

            return [lambda: all_to_all_among(selector, nodes.neighbors, in_order, blocks, tag), between]

        crossing = (count - 1) * out.numel() * dtype.itemsize
        in_node = (local_ranks - 1) * own.nbytes
        traffic = CollectiveTraffic(self._kind, local.numel(), in_node + crossing, crossing)
        finish = partial(ops.sum_shards_, out, averages, 1.0 / count, accumulate)
        return collectives.run_phases(phases, traffic, self._label, finish, reduces=True)


class HybridShardReduceScatter(GradientReduceScatter):
    """Averages inside the sharding group, then over ``replicas`` of its shards, in the order of the ranks
    (MiCS, Zhang et al., arXiv 2205.00119). Both sums run in float32. The first is rounded to the
    communication precision."""

    def __init__(self, unit: Unit, dtype: torch.dtype | None, replicas: Collectives) -> None:
        super().__init__(unit, dtype)
        self._replicas = replicas

    def start(
        self, local: torch.Tensor, out: torch.Tensor, accumulate: bool, borrow: Borrow
    ) -> PendingCollective:
        payload, numel = self._payload(local, borrow), out.numel()
        group, replicas = self._unit.collectives, self._replicas
        most = max(group.world_size, replicas.world_size) - 1
        received = borrow(numel * most, payload.dtype, "received")
        slices = list(payload.chunk(group.world_size))
        own = slices[group.rank]
        # Both phases receive into the same memory. The sum between them has read what the first one received.
        in_order = in_rank_order(own, group.rank, group.world_size, received)
        averages = in_rank_order(own, replicas.rank, replicas.world_size, received)

        def phases(_: TransportSelector, tag: int) -> Sequence[Phase]:
            def over_groups() -> Sequence[Waitable]:
                ops.sum_shards_(own, in_order, 1.0 / group.world_size, False)
                return replicas.reductions.for_tensor(own).all_to_all(averages, [own] * len(averages), tag)

            return [lambda: group.reductions.for_tensor(own).all_to_all(in_order, slices, tag), over_groups]

        traffic = CollectiveTraffic(
            self._kind,
            local.numel(),
            own.nbytes * (group.world_size + replicas.world_size - 2),
            own.nbytes * (group.nodes.remote_ranks + replicas.nodes.remote_ranks),
        )
        finish = partial(ops.sum_shards_, out, averages, 1.0 / replicas.world_size, accumulate)
        return group.run_phases(phases, traffic, self._label, finish, reduces=True)


class QuantizedReduceScatter(GradientReduceScatter):
    """Sends codes of ``form``: all-to-all inside the node and then between nodes, quantized once before each
    (qgZ; ZeRO++, Wang et al., arXiv 2306.10209, section 3.3).

    A rank receives its neighbors' slices for all ranks with its local rank, and sends them the sums. Slices
    are ordered so that what goes to one rank is contiguous. All sums run in float32 and in the order of the
    ranks.
    """

    def __init__(self, unit: Unit, form: ops.BlockFormat) -> None:
        super().__init__(unit)
        self._format = form

    def start(
        self, local: torch.Tensor, out: torch.Tensor, accumulate: bool, borrow: Borrow
    ) -> PendingCollective:
        collectives, nodes = self._unit.collectives, self._unit.collectives.nodes
        payload_bytes = self._format.payload_bytes(out.numel())
        sent = borrow(payload_bytes * nodes.world_size, torch.uint8, "sent")
        received = borrow(payload_bytes * nodes.world_size, torch.uint8, "received")
        order = [
            node * nodes.ranks_per_node + position
            for position in range(nodes.ranks_per_node)
            for node in range(nodes.nodes)
        ]
        ops.quantize_(sent, local, self._format, nodes.world_size, order)
        last = payload_bytes * (nodes.nodes if nodes.nodes > 1 else nodes.ranks_per_node)

        def phases(selector: TransportSelector, tag: int) -> Sequence[Phase]:
            def inside() -> Sequence[Waitable]:
                return _all_to_all(selector, nodes.neighbors, received, sent, tag)

            def between() -> Sequence[Waitable]:
                # The first phase has ended, so its memory is used again: the sums are sent
                # from ``sent``, and after that ``received`` receives those of other nodes.
                if nodes.ranks_per_node > 1:
                    ops.requantize_(sent[:last], received, self._format, None, 1.0, nodes.nodes)
                return _all_to_all(selector, nodes.counterparts, received[:last], sent[:last], tag)

            return [inside] * (nodes.ranks_per_node > 1) + [between] * (nodes.nodes > 1)

        crossing = payload_bytes * (nodes.nodes - 1)
        in_node = payload_bytes * nodes.nodes * (nodes.ranks_per_node - 1)
        traffic = CollectiveTraffic(self._kind, local.numel(), in_node + crossing, crossing)
        # The gradient itself is not needed once it is quantized. Its memory holds the sum that is rounded.
        direct = out.dtype is torch.float32
        total = out if direct else local.view(torch.float32)[: out.numel()]

        def finish() -> None:
            factor = 1.0 / nodes.world_size
            ops.sum_quantized_(total, received[:last], self._format, factor, accumulate and direct)
            if not direct:
                ops.sum_shards_(out, [total], 1.0, accumulate)

        return collectives.run_phases(phases, traffic, self._label, finish, reduces=True)


def _all_to_all(
    selector: TransportSelector, ranks: Sequence[int], received: torch.Tensor, sent: torch.Tensor, tag: int
) -> Sequence[Waitable]:
    """Exchange equal chunks among ``ranks``. What this rank sends itself is copied."""
    receives, sends = received.chunk(len(ranks)), sent.chunk(len(ranks))
    position = ranks.index(selector.rank)
    receives[position].copy_(sends[position])
    return all_to_all_among(selector, ranks, receives, sends, tag)


def gradient_reduce_scatter(
    unit: Unit, config: ZeroConfig, replicas: Collectives | None
) -> GradientReduceScatter:
    """Return the reduce-scatter of ``unit``'s gradient. ``replicas`` are ranks with the same shards."""
    configured = config.precision.communication_dtype
    dtype = DTYPES[configured] if configured is not None else None
    if replicas is not None:
        return HybridShardReduceScatter(unit, dtype, replicas)
    form = format_of(config.communication.quantized_gradients)
    if form is not None and unit.placement.grads and unit.collectives.world_size > 1:
        return QuantizedReduceScatter(unit, form)
    node_by_node = unit.collectives.reduction == "node_order"
    return NodeOrderedReduceScatter(unit, dtype) if node_by_node else GradientReduceScatter(unit, dtype)
