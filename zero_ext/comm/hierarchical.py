"""Hierarchical collectives, which cross nodes at most once (ZeRO++, Wang et al., arXiv 2306.10209)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_ext.comm.node_map import NodeMap
from zero_ext.comm.pending_collective import Phase
from zero_ext.comm.transport import TransportSelector, Waitable, all_to_all_among


def gather_through_nodes(
    selector: TransportSelector, nodes: NodeMap, slots: Sequence[torch.Tensor], tag: int = 0
) -> list[Phase]:
    """Return the phases that fill ``slots`` with the payloads of all ranks, in rank order.

    All payloads have the same length. The slot of this rank holds its own payload already. In the inter-node
    phase the ranks with the same local rank exchange theirs, so each payload crosses to another node once. In
    the intra-node phase the ranks of a node exchange what they received. One node needs only the latter.
    """

    def between() -> Sequence[Waitable]:
        receives = [slots[rank] for rank in nodes.counterparts]
        sends = [slots[nodes.rank]] * nodes.nodes
        return all_to_all_among(selector, nodes.counterparts, receives, sends, tag)

    def inside() -> Sequence[Waitable]:
        return gather_in_node(selector, nodes, slots, tag)

    if nodes.nodes == 1:
        return [inside]
    return [between, inside] if nodes.ranks_per_node > 1 else [between]


def gather_in_node(
    selector: TransportSelector, nodes: NodeMap, slots: Sequence[torch.Tensor], tag: int = 0
) -> Sequence[Waitable]:
    """Fill ``slots``, where each rank has the payloads of its counterparts in all nodes."""
    works: list[Waitable] = []
    for first in range(0, nodes.world_size, nodes.ranks_per_node):
        receives = slots[first : first + nodes.ranks_per_node]
        sends = [receives[nodes.local_rank]] * nodes.ranks_per_node
        works += all_to_all_among(selector, nodes.neighbors, receives, sends, tag)
    return works


def in_rank_order(own: torch.Tensor, index: int, count: int, received: torch.Tensor) -> list[torch.Tensor]:
    """Return one tensor per rank of ``count`` ranks, in rank order.

    The entry at ``index`` is ``own``. The others are slices of ``received``, each of the size of ``own``.
    """
    others = list(received[: own.numel() * (count - 1)].split(own.numel()))
    return [*others[:index], own, *others[index:]]
