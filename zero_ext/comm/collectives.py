"""Gather and reduce-scatter of flat buffers, summed in rank order and in float32.

gloo's own reduce-scatter is an all-reduce and a slice, NCCL's adds up in the dtype that is sent and in an
order of its own. So ranks exchange shards instead, and each adds those of its slice in one pass
(:func:`zero_ext.ops.sum_shards_`).
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from zero_ext import ops
from zero_ext.comm.flight_recorder import FlightRecorder
from zero_ext.comm.hierarchical import NodeMap, gather_in_node, gather_through_nodes, in_rank_order
from zero_ext.comm.pending_collective import CollectiveOrder, OrderedTransport, PendingCollective, Phase
from zero_ext.comm.traffic_stats import CollectiveTraffic, TrafficStats
from zero_ext.comm.transport import (
    SubgroupTransport,
    TransportSelector,
    Waitable,
    all_to_all_among,
    sum_in_order,
)
from zero_ext.config.communication import (
    Reduction,
    ResolvedReduction,
    check_shard_group_size,
    resolve_reduction,
)
from zero_ext.config.events import Bus, CollectiveEnd
from zero_ext.config.internal_error import zero_ext_bug


class Collectives:
    """The collectives of one group of ``world_size`` ranks, counted in ``traffic``.

    They take tensors of the host or of the device that ``gathers`` and ``reductions`` serve.

    In host memory these are separate transports, so that the order of parameter gathers relative to gradient
    reductions need not agree between ranks; within each the order must agree. A device's backend has one set
    of connections for both (``in_one_order``). All ranks then begin everything in one order: whoever begins
    reductions at times of its own catches up in :attr:`before_gather`. ``reduction`` is how gradients are
    added up, see ``PrecisionConfig``. The end of each is published on ``bus``. ``nodes`` says
    which ranks share a node; without it all do. All ranks share the state, unless :meth:`shard_among` says
    otherwise. ``model`` are the collectives of the other model-parallel ranks (pipeline stages, tensor
    parallelism); None without model parallelism. ``slices`` are those of all data-parallel and
    tensor-parallel ranks of a pipeline stage; None unless :meth:`join_slices` has set them. ``recorder``
    finds ranks that make different collectives; ``members`` are the ranks of this group among those that it
    compares. ``ranks`` are the same ranks in the world.

    What every rank has is shared by all of them, an expert by the ranks that :meth:`join_experts` named.
    """

    def __init__(
        self,
        gathers: TransportSelector,
        reductions: TransportSelector,
        traffic: TrafficStats,
        nodes: NodeMap | None = None,
        recorder: FlightRecorder | None = None,
        members: Sequence[int] | None = None,
        ranks: Sequence[int] | None = None,
        *,
        reduction: ResolvedReduction = "rank_order",
        in_one_order: bool = False,
    ):
        self.rank, self.world_size = rank, world_size = gathers.rank, gathers.world_size
        self.ranks = tuple(range(world_size) if ranks is None else ranks)
        self.traffic = traffic
        self.bus = Bus()
        self.nodes = nodes or NodeMap(rank, world_size, world_size)
        self.reduction = reduction
        self.in_one_order = in_one_order
        self._members = tuple(range(world_size) if members is None else members)
        self._recorder = recorder or FlightRecorder(rank, None)
        order = CollectiveOrder()
        channel = self._recorder.channel("gathers", self._members)
        self._gathers = OrderedTransport(gathers, channel, order)
        channel = self._recorder.channel("reductions", self._members)
        self._reductions = OrderedTransport(reductions, channel, order if in_one_order else CollectiveOrder())
        if members is None:
            # The reference is weak because this object has the recorder. A cycle would keep the
            # connections of a dropped engine until a garbage collection. Groups cut from this one
            # share its recorder and connections, so this one aborts for all.
            abort = weakref.WeakMethod(self.abort)
            self._recorder.abort = lambda reason: _call(abort(), reason)
        self._groups: tuple[Collectives, Collectives] | None = None
        self.model: Collectives | None = None
        self.slices: Collectives | None = None
        self.tensor_rank = 0
        # Makes them again, see ``reconnected``. None in a group of some of the ranks.
        self.reconnect: Callable[[], Collectives] | None = None
        self._experts: Collectives | None = None

    @property
    def reductions(self) -> TransportSelector:
        """The transports of :meth:`run_phases` with ``reduces``."""
        return self._reductions.unordered

    @property
    def before_gather(self) -> Callable[[], None]:
        """Return what is called before a gather or broadcast of this group or of one of its groups."""
        return self._gathers.order.before_gather

    @before_gather.setter
    def before_gather(self, action: Callable[[], None]) -> None:
        self._gathers.order.before_gather = action

    def continue_in_stream(self, beside: Callable[[], AbstractContextManager[object]]) -> None:
        """Continue collectives of several phases in the stream ``beside`` when others start."""
        self._gathers.order.beside = self._reductions.order.beside = beside

    @property
    def shards(self) -> Collectives:
        """The collectives of this rank's sharding group."""
        return self if self._groups is None else self._groups[0]

    @property
    def replicas(self) -> Collectives | None:
        """The collectives of the ranks with the same shards; None where there is only this one."""
        return None if self._groups is None else self._groups[1]

    def shard_among(self, ranks: int | None) -> None:
        """Forms sharding groups of ``ranks`` consecutive ranks (MiCS, Zhang et al., arXiv 2205.00119); None
        leaves all in one.

        Raises ``ValueError`` where the groups do not fill the world, or nodes and groups overlap.
        """
        if ranks is None or ranks == self.world_size:
            return
        check_shard_group_size(ranks, self.world_size, self.nodes.ranks_per_node)
        first = self.rank // ranks * ranks
        self._groups = (
            self.among(range(first, first + ranks)),
            self.among(range(self.rank - first, self.world_size, ranks)),
        )

    def join_model(self, model: Collectives) -> None:
        """Set the collectives of the other model-parallel ranks, which share ``traffic`` and ``bus``."""
        model.traffic, model.bus = self.traffic, self.bus
        self.model = model

    def join_slices(self, slices: Collectives, tensor_rank: int) -> None:
        """Set the collectives of the ranks that have slices of the same tensors, or shards of these, which
        share ``traffic`` and ``bus``. ``tensor_rank`` is this one's among the tensor-parallel ranks."""
        slices.traffic, slices.bus = self.traffic, self.bus
        self.slices, self.tensor_rank = slices, tensor_rank

    def join_experts(self, ranks: Sequence[int]) -> None:
        """Names the ranks with the same experts as this one, in ascending order."""
        self._experts = self.among(ranks)

    def holders(self, expert: bool) -> Collectives:
        """Return the collectives of the ranks that have the same parameters, of an ``expert`` or not."""
        return self._experts if expert and self._experts is not None else self

    def among(self, ranks: Sequence[int]) -> Collectives:
        """Return the collectives of a group of ``ranks``, this one among them, over the same connections and
        counted in the same log. All ranks belong to groups of one size, which do everything at the same
        time.
        """
        nodes = self.nodes.among(ranks)
        # A ``SubgroupTransport`` cannot sum on the way, so groups of a world that the backend sums
        # for add up node by node.
        wanted: Reduction = "rank_order" if self.reduction == "rank_order" else "node_order"
        group = Collectives(
            SubgroupTransport(self._gathers.unordered, ranks),
            SubgroupTransport(self._reductions.unordered, ranks),
            self.traffic,
            nodes,
            self._recorder,
            [self._members[rank] for rank in ranks],
            [self.ranks[rank] for rank in ranks],
            reduction=resolve_reduction(wanted, len(ranks), nodes.ranks_per_node),
            in_one_order=self.in_one_order,
        )
        group.bus = self.bus
        # The group uses the same connections, so the phases of its collectives and of this object's
        # are started in one order.
        group._gathers.order = self._gathers.order
        group._reductions.order = self._reductions.order
        return group

    def reconnected(self) -> Collectives:
        """Return collectives of the same ranks in host memory, over connections and counted in a log of their
        own. Their order relative to all others is free, so a thread may make them. A collective."""
        if self.reconnect is None:
            raise zero_ext_bug("a group of ranks has no connections that can be made again")
        return self.reconnect()

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory that device tensors go through between the ranks."""
        reductions = 0 if self.in_one_order else self._reductions.unordered.staging_bytes
        return self._gathers.unordered.staging_bytes + reductions

    def gather(
        self, flat: torch.Tensor, shard: torch.Tensor, kind: str, label: str, may_be_nan: bool = False
    ) -> PendingCollective:
        """Fill ``flat`` [numel] with the shards [numel / N] of all ranks, in rank order.

        ``shard`` may be this rank's own slice of ``flat`` (in-place gather). Same dtype on both. Gradients
        ``may_be_nan``: they go where gradients are reduced, which nobody checks, in the order of reductions.
        """
        # Transports gather in place: they send this rank's slice of ``flat``.
        if flat.data_ptr() + self.rank * shard.nbytes != shard.data_ptr():
            flat.narrow(0, self.rank * shard.numel(), shard.numel()).copy_(shard)
        # ``before_gather`` begins the reductions that are due. On a device all ranks begin gathers
        # and reductions in one order, so the call comes before the gather is recorded and started.
        if not may_be_nan:
            self.before_gather()
        ordered = self._reductions if may_be_nan else self._gathers
        transport = ordered.unordered.for_tensor(flat)
        traffic = self._flat_traffic(kind, flat.numel(), shard.nbytes, transport.rings)
        return self._start(ordered, label, traffic, lambda: transport.gather(flat, _tag(label)))

    def gather_ranges(
        self, flat: torch.Tensor, ranges: Sequence[tuple[int, int]], kind: str, label: str
    ) -> PendingCollective:
        """Fill ``ranges`` of ``flat`` [numel] from the slices [numel / N] of all ranks.

        A range is a first element and the one after the last. The ranges are the same on all ranks and do not
        overlap. This rank's own slice has its elements of them already. The rest of ``flat`` is neither sent
        nor changed.
        """
        numel = flat.numel() // self.world_size
        slices = [
            [
                flat[max(begin, first) : min(end, first + numel)]
                for begin, end in ranges
                if begin < first + numel and end > first
            ]
            for first in range(0, flat.numel(), numel)
        ]
        own = sum(each.nbytes for each in slices[self.rank])
        elements = sum(end - begin for begin, end in ranges)
        sent, crossing = own * (self.world_size - 1), own * self.nodes.remote_ranks
        # A rank without a range waits for those that have one.
        peers = None if own else [self._members[rank] for rank, each in enumerate(slices) if each]
        self.before_gather()
        transport = self._gathers.unordered.for_tensor(flat)

        def start() -> Sequence[Waitable]:
            works: list[Waitable] = []
            # Each round sends one range of each rank, so that nothing is packed.
            for number in range(max(map(len, slices)) if self.world_size > 1 else 0):
                receives = [each[number] if number < len(each) else flat[:0] for each in slices]
                sends = [receives[self.rank]] * self.world_size
                works += transport.all_to_all(receives, sends, (_tag(label) + number) & 0x7FFFFFFF)
            return works

        return self._start(
            self._gathers, label, CollectiveTraffic(kind, elements, sent, crossing), start, None, peers
        )

    def reduce_scatter(
        self,
        flat: torch.Tensor,
        out: torch.Tensor,
        received: torch.Tensor,
        accumulate: bool,
        kind: str,
        label: str,
    ) -> PendingCollective:
        """Average ``flat`` [numel] over the ranks; this rank's shard of it goes to ``out`` [numel / N].

        ``received`` is scratch of ``flat``'s dtype, in use until ``wait`` returns: numel / N elements where
        the backend adds up, else (N - 1) * numel / N. Then the sum runs in float32 and in rank order, so it
        does not depend on bucket or stage. ``accumulate`` adds to ``out``; ``out`` may be this rank's own
        slice of ``flat`` if not accumulating.
        """
        transport = self.reductions.for_tensor(flat)
        rings = self.reduction == "backend" and transport.rings
        traffic = self._flat_traffic(kind, flat.numel(), out.numel() * flat.element_size(), rings)
        shards: list[torch.Tensor] = []

        def start() -> Sequence[Waitable]:
            if rings:
                # The backend returns the sum. ``finish`` has this one tensor to average and add to
                # ``out``.
                shards.append(received[: out.numel()])
                return transport.reduce_scatter(flat, shards[0])
            slices = list(flat.chunk(self.world_size))
            shards.extend(in_rank_order(slices[self.rank], self.rank, self.world_size, received))
            return transport.all_to_all(shards, slices, _tag(label))

        def finish() -> None:
            ops.sum_shards_(out, shards, 1.0 / self.world_size, accumulate)

        return self._start(self._reductions, label, traffic, start, finish)

    def gather_payloads(
        self,
        slots: Sequence[torch.Tensor],
        kind: str,
        elements: int,
        label: str,
        *,
        in_node: bool = False,
        may_be_nan: bool = False,
    ) -> PendingCollective:
        """Fill ``slots`` with the payloads of all ranks, so that each crosses to another node once.

        The slots are equally long tensors in rank order, and this rank's own is filled already. With
        ``in_node`` the slots of this rank's counterparts in all nodes are filled too, and nothing crosses.
        ``elements`` is counted in ``traffic``; ``may_be_nan`` as in :meth:`gather`.
        """
        nodes, payload_bytes = self.nodes, slots[0].nbytes
        crossing = 0 if in_node else payload_bytes * (nodes.nodes - 1)
        sent = crossing + payload_bytes * nodes.nodes * (nodes.ranks_per_node - 1)

        def phases(selector: TransportSelector, tag: int) -> Sequence[Phase]:
            if in_node:
                return [lambda: gather_in_node(selector, nodes, slots, tag)]
            return gather_through_nodes(selector, nodes, slots, tag)

        return self.run_phases(
            phases, CollectiveTraffic(kind, elements, sent, crossing), label, reduces=may_be_nan
        )

    def run_phases(
        self,
        phases: Callable[[TransportSelector, int], Sequence[Phase]],
        traffic: CollectiveTraffic,
        label: str,
        finish: Callable[[], None] | None = None,
        *,
        reduces: bool,
    ) -> PendingCollective:
        """Start a collective of several phases. Each starts when the one before has ended.

        ``phases`` makes them from the transports and a tag. ``finish`` runs once after the wait for the last.
        With ``reduces`` they go in the order of reductions, else in that of gathers.
        """
        if not reduces:
            self.before_gather()
        ordered = self._reductions if reduces else self._gathers
        # A rank of several nodes waits for some of the others only.
        peers = self._members if self.nodes.nodes == 1 and self._groups is None else ()

        def start() -> Sequence[Waitable]:
            return ordered.order.chain(phases(ordered.unordered, _tag(label)))

        return self._start(ordered, label, traffic, start, finish, peers)

    def exchange(
        self,
        receives: Sequence[torch.Tensor],
        sends: Sequence[torch.Tensor],
        kind: str,
        elements: int,
        label: str,
    ) -> PendingCollective:
        """Send ``sends[r]`` to every other rank ``r``, and fill ``receives[r]`` with what it sends.

        Lengths may differ; nothing is sent for empty tensors. ``elements`` is counted in ``traffic``.
        """
        nbytes = [0 if rank == self.rank else each.nbytes for rank, each in enumerate(sends)]
        own = self.rank // self.nodes.ranks_per_node
        crossing = sum(size for rank, size in enumerate(nbytes) if rank // self.nodes.ranks_per_node != own)
        traffic = CollectiveTraffic(kind, elements, sum(nbytes), crossing)
        transport = self.reductions.for_tensor(sends[0])
        start = functools.partial(transport.all_to_all, receives, sends, _tag(label))
        return self._start(self._reductions, label, traffic, start)

    def exchange_payloads(
        self,
        receives: Sequence[torch.Tensor],
        sends: Sequence[torch.Tensor],
        kind: str,
        elements: int,
        label: str,
    ) -> PendingCollective:
        """Send ``sends[r]`` to every other rank ``r``, and fill ``receives[r]`` with what it sends.

        All payloads have the same length. They go in the order of reductions. ``elements`` is counted in
        ``traffic``.
        """
        traffic = self._flat_traffic(kind, elements, sends[0].nbytes)
        transport = self.reductions.for_tensor(sends[0])
        start = functools.partial(transport.all_to_all, receives, sends, _tag(label))
        return self._start(self._reductions, label, traffic, start)

    def sum_(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        """Sum a small tensor over the ranks in place, and return it.

        Host tensors are added up in rank order. Ranks that are at another collective get an error.
        """
        if self.world_size > 1:
            traffic = self._flat_traffic("scalars", tensor.numel(), tensor.nbytes)
            transport = self.reductions.for_tensor(tensor)
            self._start(
                self._reductions, label, traffic, lambda: [transport.all_reduce(tensor, _tag(label))]
            ).wait()
        return tensor

    def sum_among_(self, ranks: Sequence[int], tensor: torch.Tensor, label: str) -> None:
        """Sum a contiguous ``tensor`` [n] over ``ranks`` of this group in place, in rank order;
        half-precision numbers in float32. All ranks of the group make the call, as the backend of a device
        asks of them. One that is not among ``ranks`` gives an empty tensor."""
        count = len(ranks)
        index = ranks.index(self.rank) if self.rank in ranks else None
        traffic = CollectiveTraffic("scalars", tensor.numel(), tensor.nbytes * (count - 1), 0)
        received = tensor.new_empty(tensor.numel() * (count - 1))
        tensors = in_rank_order(tensor, index or 0, count, received)
        # As bytes: a rank outside ``ranks`` does not know the dtype.
        receives, sends = ([each.view(torch.uint8) for each in many] for many in (tensors, [tensor] * count))
        start = functools.partial(all_to_all_among, self.reductions, ranks, receives, sends, _tag(label))
        # A rank outside ``ranks`` has no elements. It waits for nobody. The record omits the number
        # of elements, by which the ranks would seem to be at different collectives.
        peers = () if index is None or not tensor.numel() else [self._members[rank] for rank in ranks]
        self._start(self._reductions, label, traffic, start, None, peers, entry=label).wait()
        tensor.copy_(sum_in_order(tensors))

    def broadcast_(self, tensor: torch.Tensor, source: int, label: str) -> torch.Tensor:
        """Copy a contiguous ``tensor`` from rank ``source`` of the group to all ranks."""
        if self.world_size == 1:
            return tensor
        self.before_gather()
        traffic = self._flat_traffic("broadcast", tensor.numel(), tensor.nbytes if self.rank == source else 0)
        transport = self._gathers.unordered.for_tensor(tensor)
        start = functools.partial(transport.broadcast, tensor, source, _tag(label))
        # A receiver ends without the other receivers. The recorder must not take two of them for
        # ranks that wait for each other.
        peers = self._members if self.rank == source else [self._members[source]]
        self._start(self._gathers, label, traffic, start, None, peers).wait()
        return tensor

    def abort(self, reason: str) -> None:
        """Abort all collectives of this rank after an error of its own.

        The other ranks, which wait for it, then fail with ``reason`` rather than by their time-out.
        """
        # The recorder stops first, so that the waits that end here raise ``reason`` and no
        # mismatch.
        self._recorder.stop()
        self._gathers.unordered.abort(reason)
        self._reductions.unordered.abort(reason)

    def _start(
        self,
        ordered: OrderedTransport,
        label: str,
        traffic: CollectiveTraffic,
        start: Callable[[], Sequence[Waitable]],
        finish: Callable[[], None] | None = None,
        peers: Sequence[int] | None = None,
        *,
        entry: str | None = None,
    ) -> PendingCollective:
        """Count a collective, record it as ``entry``, and start it.

        It ends only after ``peers`` have begun it, by default all ranks. Its end is published on the bus.
        """
        kind, elements, sent, _ = traffic
        self.traffic.record(traffic)
        on_end, ranks, bus = None, self.world_size, self.bus
        # Without a subscriber there is no callback, and ``wait`` then reads no clock.
        if bus and ranks > 1:

            def publish(began: float, seconds: float) -> None:
                bus.publish(CollectiveEnd(kind, label, ranks, elements, sent, began, seconds))

            on_end = publish
        recorded = self._recorder, ordered.channel.begin(entry or f"{label}, {elements} elements", peers)
        return PendingCollective(label, self.rank, recorded, ordered.order, start, finish, on_end)

    def _flat_traffic(
        self, kind: str, elements: int, slice_bytes: int, rings: bool = False
    ) -> CollectiveTraffic:
        """Return the traffic of a collective in which this rank sends ``slice_bytes`` to each other rank.

        In a ring it passes on as many slices, and one rank per node sends to another node. Rings begin at
        each rank in turn, so every rank is counted its share.
        """
        sent = slice_bytes * (self.world_size - 1)
        if rings:
            crossing = sent // self.nodes.ranks_per_node if self.nodes.nodes > 1 else 0
        else:
            crossing = slice_bytes * self.nodes.remote_ranks
        return CollectiveTraffic(kind, elements, sent, crossing)


def _call(action: Callable[[str], None] | None, reason: str) -> None:
    if action is not None:
        action(reason)


@functools.lru_cache(maxsize=4096)
def _tag(label: str) -> int:
    """Return what ranks at the same call agree on, so that units of equal size are not mixed up."""
    return zlib.crc32(label.encode()) & 0x7FFFFFFF
