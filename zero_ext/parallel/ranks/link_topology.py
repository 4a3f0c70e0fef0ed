"""The topology of links between ranks, in levels from inside a node outwards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkLevel:
    """Neighboring ranks that share one link outwards.

    Attributes:
        name: for messages and plots.
        ranks: that share the link. One: the rank's own link to its neighbors.
        bandwidth: bytes per second into them, and as many out.
        latency: seconds that a message over it takes besides.

    Raises:
        ValueError: a number is out of range.
    """

    name: str
    ranks: int
    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if self.ranks < 1 or not self.bandwidth > 0 or not self.latency >= 0:
            raise ValueError(
                f"level '{self.name}': expected at least one rank, a positive bandwidth and no negative "
                f"latency, got {self.ranks} ranks at {self.bandwidth} bytes/s and {self.latency} s. Correct "
                "the level."
            )


@dataclass(frozen=True)
class LinkTopology:
    """Ranks under levels of links.

    Attributes:
        world_size: number of ranks.
        levels: from the innermost, single ranks, outwards.

    Raises:
        ValueError: the first level is not of single ranks, or a further one is not made of full ones of the
            level before. The last one may be partly filled.
    """

    world_size: int
    levels: tuple[LinkLevel, ...]

    def __post_init__(self) -> None:
        if self.world_size < 1 or not self.levels or self.levels[0].ranks != 1:
            raise ValueError(
                "LinkTopology: expected at least one rank and a first level of single ranks, got "
                f"{self.world_size} ranks and levels {[level.name for level in self.levels]}. Start the "
                "levels with a rank's own link."
            )
        for inner, outer in zip(self.levels, self.levels[1:], strict=False):
            if outer.ranks <= inner.ranks or outer.ranks % inner.ranks:
                raise ValueError(
                    f"level '{outer.name}': expected several full levels '{inner.name}' of {inner.ranks} "
                    f"ranks, got {outer.ranks} ranks. Use a larger multiple of {inner.ranks}."
                )

    @classmethod
    def of_nodes(
        cls, world_size: int, ranks_per_node: int, inside: float, between: float, latency: float = 0.0
    ) -> LinkTopology:
        """Return the topology of equal nodes.

        Args:
            world_size: number of ranks.
            ranks_per_node: ranks of a node.
            inside: bytes per second that a rank receives from its node.
            between: bytes per second that a node receives from other nodes.
            latency: seconds of a message between nodes.

        Returns:
            The topology.
        """
        levels = [LinkLevel("rank", 1, inside)]
        if ranks_per_node > 1:
            levels.append(LinkLevel("node", ranks_per_node, between, latency))
        elif between < inside:
            levels = [LinkLevel("rank", 1, between, latency)]
        return cls(world_size, tuple(levels))
