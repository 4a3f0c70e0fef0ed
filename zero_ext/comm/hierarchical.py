"""Exchanges that cross from node to node once, or not at all (ZeRO++, Wang et al., arXiv 2306.10209)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_ext.comm.collective_order import Hop
from zero_ext.comm.node_map import NodeMap
from zero_ext.comm.transport import Exchange, Waitable


def gather_through_nodes(
    exchange: Exchange, nodes: NodeMap, slots: Sequence[torch.Tensor], tag: int = 0
) -> list[Hop]:
    """The hops that fill ``slots`` with the messages of all ranks, in rank order and equally long; this
    rank's own is in its place.

    First the ranks with the same place in all nodes exchange theirs, so that each message crosses to another
    node once; then the ranks of a node what they have. On one node it is the flat gather.
    """

    def between() -> Sequence[Waitable]:
        receives = [slots[rank] for rank in nodes.counterparts]
        sends = [slots[nodes.rank]] * nodes.nodes
        return exchange_among(exchange, nodes.counterparts, receives, sends, tag)

    def inside() -> Sequence[Waitable]:
        return gather_in_node(exchange, nodes, slots, tag)

    if nodes.nodes == 1:
        return [inside]
    return [between, inside] if nodes.ranks_per_node > 1 else [between]


def gather_in_node(
    exchange: Exchange, nodes: NodeMap, slots: Sequence[torch.Tensor], tag: int = 0
) -> Sequence[Waitable]:
    """Fills ``slots``, as above, where each rank has the messages of its counterparts in all nodes."""
    works: list[Waitable] = []
    for first in range(0, nodes.world_size, nodes.ranks_per_node):
        receives = slots[first : first + nodes.ranks_per_node]
        sends = [receives[nodes.place]] * nodes.ranks_per_node
        works += exchange_among(exchange, nodes.neighbours, receives, sends, tag)
    return works


def exchange_among(
    exchange: Exchange,
    ranks: Sequence[int],
    receives: Sequence[torch.Tensor],
    sends: Sequence[torch.Tensor],
    tag: int = 0,
) -> Sequence[Waitable]:
    """An all-to-all of ``ranks`` alone, a tensor for each of them, in the order of ``ranks``."""
    empty = sends[0][:0]
    all_receives, all_sends = [empty] * exchange.world_size, [empty] * exchange.world_size
    for rank, receive, send in zip(ranks, receives, sends, strict=True):
        all_receives[rank], all_sends[rank] = receive, send
    return exchange.all_to_all(all_receives, all_sends, tag)


def around(own: torch.Tensor, place: int, count: int, received: torch.Tensor) -> list[torch.Tensor]:
    """A tensor like ``own`` for each of ``count`` ranks, in order: parts of ``received`` for the others,
    ``own`` itself for the one at ``place``."""
    others = list(received[: own.numel() * (count - 1)].split(own.numel()))
    return [*others[:place], own, *others[place:]]
