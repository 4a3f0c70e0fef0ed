"""The ranks that share a node, and so have fast links between them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from zero_ext.config.sections.communication import check_ranks_per_node


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
        counts = {nodes.count(node) for node in nodes}
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
