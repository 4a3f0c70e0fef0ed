"""Nodes, the ranks that share fast links, and collectives that cross them at most once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zero_ext.comm.pending_collective import Phase
from zero_ext.comm.transport import TransportSelector, Waitable, all_to_all_among
from zero_ext.config.communication import check_ranks_per_node


@dataclass(frozen=True)
class NodeMap:
    """``world_size`` ranks on nodes of ``ranks_per_node`` consecutive ones each, seen by ``rank``.

    Raises ``ValueError`` where the ranks do not fill their nodes.
    """

    rank: int
    world_size: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        check_ranks_per_node(self.ranks_per_node, self.world_size)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.world_size // self.ranks_per_node

    @property
    def node(self) -> int:
        """The node of this rank."""
        return self.rank // self.ranks_per_node

    @property
    def local_rank(self) -> int:
        """Index of this rank in its node."""
        return self.rank % self.ranks_per_node

    @property
    def neighbors(self) -> range:
        """The ranks of this rank's node, itself among them."""
        first = self.node * self.ranks_per_node
        return range(first, first + self.ranks_per_node)

    @property
    def counterparts(self) -> range:
        """The ranks with this rank's local rank in all nodes, itself among them."""
        return range(self.local_rank, self.world_size, self.ranks_per_node)

    @property
    def remote_ranks(self) -> int:
        """Number of ranks in other nodes."""
        return self.world_size - self.ranks_per_node

    def summary(self) -> str:
        """Return the number of ranks and nodes, for the log."""
        return f"{self.world_size} ranks on {self.nodes} node{'s' * (self.nodes > 1)}"

    def among(self, ranks: Sequence[int]) -> NodeMap:
        """Return the map that a group of these ranks has, this one among them, in ascending order; where they
        are not equally many of each node that has any, that of a single node.
        """
        nodes = [rank // self.ranks_per_node for rank in ranks]
        counts = set(Counter(nodes).values())
        return NodeMap(ranks.index(self.rank), len(ranks), counts.pop() if len(counts) == 1 else len(ranks))


def ranks_of_a_node(world_size: int, wanted: int | None) -> int:
    """``wanted``, else what a launcher said (``LOCAL_WORLD_SIZE``) where it divides ``world_size``, else all
    of them."""
    if wanted is not None:
        return wanted
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    local = int(said) if said.isdigit() else 0
    return local if local and world_size % local == 0 else world_size


def nodes_of(ranks: Sequence[int], rank: int, world_size: int, wanted: int | None) -> NodeMap:
    """Return the map of a group of ``ranks`` of the world, seen by the one at index ``rank`` in it: nodes of
    ``wanted`` of them, else those of the world that a launcher named, else a single one."""
    if wanted is not None or len(ranks) == world_size:
        return NodeMap(rank, len(ranks), ranks_of_a_node(len(ranks), wanted))
    # The ranks of a node have to be consecutive in the group, which they may not be in any other
    # order.
    if list(ranks) != sorted(ranks):
        return NodeMap(rank, len(ranks), len(ranks))
    return NodeMap(ranks[rank], world_size, ranks_of_a_node(world_size, None)).among(ranks)


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
