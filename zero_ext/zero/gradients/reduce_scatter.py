"""How a unit's local gradients become the average over the ranks, in their shards."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

import torch

from zero_ext import ops
from zero_ext.comm import Collectives, Exchange, Pending, Traffic
from zero_ext.comm.collective_order import Hop
from zero_ext.comm.hierarchical import around, exchange_among
from zero_ext.comm.transport import Waitable
from zero_ext.config import ZeroConfig
from zero_ext.zero.construction.grouping import DTYPES
from zero_ext.zero.memory.pool_plan import Purpose
from zero_ext.zero.units.integer_formats import format_of
from zero_ext.zero.units.unit import Unit

# Memory of a number of elements, until the reduction has ended.
Borrow = Callable[[int, torch.dtype, Purpose], torch.Tensor]


class GradientExchange(abc.ABC):
    """Averages the gradient of one unit."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @abc.abstractmethod
    def start(self, local: torch.Tensor, out: torch.Tensor, accumulate: bool, borrow: Borrow) -> Pending:
        """Begins to average ``local`` [layout.numel] over the ranks; this rank's shard of it goes to ``out``
        [layout.shard_numel], or is added to it. Nobody needs ``local`` any more where gradients are
        sharded."""

    @property
    def _kind(self) -> str:
        return self._unit.wire_kind("reduce_scatter")

    @property
    def _label(self) -> str:
        return f"reduce-scatter of the gradients of {self._unit.describe()}"


class FullGradients(GradientExchange):
    """In the precision ``wire``, or their own."""

    def __init__(self, unit: Unit, wire: torch.dtype | None) -> None:
        super().__init__(unit)
        self._wire = wire

    def start(self, local: torch.Tensor, out: torch.Tensor, accumulate: bool, borrow: Borrow) -> Pending:
        """See :class:`GradientExchange`."""
        payload, collectives = self._payload(local, borrow), self._unit.collectives
        shards = 1 if collectives.reduction == "backend" else collectives.world_size - 1
        received = borrow(out.numel() * shards, payload.dtype, "received")
        return collectives.reduce_scatter(payload, out, received, accumulate, self._kind, self._label)

    def _payload(self, local: torch.Tensor, borrow: Borrow) -> torch.Tensor:
        if self._wire in (None, local.dtype):
            return local
        payload = borrow(local.numel(), self._wire, "wire")
        ops.pack_(payload, [local], [0])
        return payload


class NodeOrderedGradients(FullGradients):
    """Averaged inside each node, then over the nodes, in the order of the ranks and of the nodes. Both sums
    run in float32. The first is rounded to the precision on the wire.

    A rank gets from its neighbors their slices for all ranks with its place in their nodes, and exchanges the
    sums with these. So of S bytes each rank sends S / G * (M - 1) / M to the M - 1 other nodes of G ranks. A
    ring over all N = G * M ranks sends S * (N - 1) / N out of each node: S / G * (N - 1) / N per rank.
    """

    def start(self, local: torch.Tensor, out: torch.Tensor, accumulate: bool, borrow: Borrow) -> Pending:
        """See :class:`GradientExchange`."""
        collectives, numel = self._unit.collectives, out.numel()
        nodes = collectives.nodes
        places, count = nodes.ranks_per_node, nodes.nodes
        wire = self._wire or local.dtype
        sent = borrow(local.numel(), wire, "wire")
        # What goes to the ranks with one place in all nodes is put in one piece.
        sent.view(places, count, numel).copy_(local.view(count, places, numel).transpose(0, 1))
        runs = list(sent.chunk(places))
        own, spare = runs[nodes.place], runs[(nodes.place + 1) % places]
        # The gradient has been copied, so its memory takes what the neighbors send, if that fits.
        fits = wire.itemsize <= local.dtype.itemsize
        received = local.view(wire) if fits else borrow(local.numel(), wire, "received")
        parts = around(own, nodes.place, places, received)
        slices = list(own.chunk(count))
        averages = around(slices[nodes.node], nodes.node, count, spare)

        def hops(exchange: Exchange, tag: int) -> Sequence[Hop]:
            def between() -> Sequence[Waitable]:
                ops.sum_shards_(own, parts, 1.0 / places, False)
                return exchange_among(exchange, nodes.counterparts, averages, slices, tag)

            return [lambda: exchange_among(exchange, nodes.neighbours, parts, runs, tag), between]

        crossing = (count - 1) * out.numel() * wire.itemsize
        in_node = (places - 1) * own.nbytes
        traffic = Traffic(self._kind, local.numel(), in_node + crossing, crossing)

        def finish() -> None:
            ops.sum_shards_(out, averages, 1.0 / count, accumulate)

        return collectives.run(hops, traffic, self._label, finish, reduces=True)


class ReplicatedShards(FullGradients):
    """Averaged inside the sharding group, then over ``replicas`` of its shards, in the order of the ranks
    (MiCS, Zhang et al., arXiv 2205.00119). Both sums run in float32; the first is rounded to the precision on
    the wire."""

    def __init__(self, unit: Unit, wire: torch.dtype | None, replicas: Collectives) -> None:
        super().__init__(unit, wire)
        self._replicas = replicas

    def start(self, local: torch.Tensor, out: torch.Tensor, accumulate: bool, borrow: Borrow) -> Pending:
        """See :class:`GradientExchange`."""
        payload, numel = self._payload(local, borrow), out.numel()
        group, replicas = self._unit.collectives, self._replicas
        most = max(group.world_size, replicas.world_size) - 1
        received = borrow(numel * most, payload.dtype, "received")
        slices = list(payload.chunk(group.world_size))
        own = slices[group.rank]
        parts = around(own, group.rank, group.world_size, received)
        averages = around(own, replicas.rank, replicas.world_size, received)

        def hops(_: Exchange, tag: int) -> Sequence[Hop]:
            def over_groups() -> Sequence[Waitable]:
                ops.sum_shards_(own, parts, 1.0 / group.world_size, False)
                return replicas.reductions.all_to_all(averages, [own] * len(averages), tag)

            return [lambda: group.reductions.all_to_all(parts, slices, tag), over_groups]

        traffic = Traffic(
            self._kind,
            local.numel(),
            own.nbytes * (group.world_size + replicas.world_size - 2),
            own.nbytes * (group.nodes.strangers + replicas.nodes.strangers),
        )

        def finish() -> None:
            ops.sum_shards_(out, averages, 1.0 / replicas.world_size, accumulate)

        return group.run(hops, traffic, self._label, finish, reduces=True)


class QuantisedGradients(GradientExchange):
    """In codes of ``form``, all to all inside the node and then between nodes, quantised once before each
    (qgZ; ZeRO++, Wang et al., arXiv 2306.10209, section 3.3).

    A rank gets from its neighbours their slices for all ranks with its place in their nodes, and sends the
    sums there. Slices travel in an order in which what goes to one rank is in one piece. All sums run in
    float32 and in the order of the ranks.
    """

    def __init__(self, unit: Unit, form: ops.BlockFormat) -> None:
        super().__init__(unit)
        self._format = form

    def start(self, local: torch.Tensor, out: torch.Tensor, accumulate: bool, borrow: Borrow) -> Pending:
        """See :class:`GradientExchange`."""
        collectives = self._unit.collectives
        nodes = collectives.nodes
        message = self._format.message_bytes(out.numel())
        sent = borrow(message * nodes.world_size, torch.uint8, "wire")
        received = borrow(message * nodes.world_size, torch.uint8, "received")
        order = [
            node * nodes.ranks_per_node + place
            for place in range(nodes.ranks_per_node)
            for node in range(nodes.nodes)
        ]
        ops.quantise_(sent, local, self._format, nodes.world_size, order)
        last = message * (nodes.nodes if nodes.nodes > 1 else nodes.ranks_per_node)

        def hops(exchange: Exchange, tag: int) -> Sequence[Hop]:
            def inside() -> Sequence[Waitable]:
                return _all_to_all(exchange, nodes.neighbours, received, sent, tag)

            def between() -> Sequence[Waitable]:
                if nodes.ranks_per_node > 1:
                    ops.requantise_(sent[:last], received, self._format, None, 1.0, nodes.nodes)
                return _all_to_all(exchange, nodes.counterparts, received[:last], sent[:last], tag)

            return [inside] * (nodes.ranks_per_node > 1) + [between] * (nodes.nodes > 1)

        crossing = message * (nodes.nodes - 1)
        in_node = message * nodes.nodes * (nodes.ranks_per_node - 1)
        traffic = Traffic(self._kind, local.numel(), in_node + crossing, crossing)
        # Nobody needs the gradient itself once it is quantised: its memory holds the sum that is rounded.
        direct = out.dtype is torch.float32
        total = out if direct else local.view(torch.float32)[: out.numel()]

        def finish() -> None:
            factor = 1.0 / nodes.world_size
            ops.sum_quantised_(total, received[:last], self._format, factor, accumulate and direct)
            if not direct:
                ops.sum_shards_(out, [total], 1.0, accumulate)

        return collectives.run(hops, traffic, self._label, finish, reduces=True)


def _all_to_all(
    exchange: Exchange, ranks: Sequence[int], received: torch.Tensor, sent: torch.Tensor, tag: int
) -> Sequence[Waitable]:
    """Among ``ranks``, equal pieces; what this rank sends itself is copied."""
    receives, sends = received.chunk(len(ranks)), sent.chunk(len(ranks))
    place = ranks.index(exchange.rank)
    receives[place].copy_(sends[place])
    return exchange_among(exchange, ranks, receives, sends, tag)


def gradient_exchange(unit: Unit, config: ZeroConfig, replicas: Collectives | None) -> GradientExchange:
    """How the gradient of ``unit`` travels under ``config``, where ``replicas`` have the same shards."""
    dtype = config.precision.communication_dtype
    wire = DTYPES[dtype] if dtype is not None else None
    if replicas is not None:
        return ReplicatedShards(unit, wire, replicas)
    form = format_of(config.communication.quantized_gradients)
    if form is not None and unit.placement.grads and unit.collectives.world_size > 1:
        return QuantisedGradients(unit, form)
    node_by_node = unit.collectives.reduction == "node_order"
    return NodeOrderedGradients(unit, wire) if node_by_node else FullGradients(unit, wire)
