"""The topology of links between ranks, in levels from inside a node outwards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkLevel:
    """Neighbouring ranks that share one link outwards.

    ``ranks`` share a link that carries ``bandwidth`` bytes a second into them, and as many out; a message
    over it takes ``latency`` seconds besides. One rank: the rank's own link to its neighbours.
    """

    name: str
    ranks: int
    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if self.ranks < 1 or not self.bandwidth > 0 or not self.latency >= 0:
            raise ValueError(
                f"level '{self.name}': {self.ranks} ranks at {self.bandwidth} bytes/s and {self.latency} s "
                "given; at least one rank, a positive bandwidth and no negative latency are wanted"
            )


@dataclass(frozen=True)
class LinkTopology:
    """``world_size`` ranks under ``levels`` of links from the innermost, single ranks, outwards.

    ``ValueError`` unless the first level is of single ranks and each further one is made of full ones of the
    level before. The last one may be partly filled.
    """

    world_size: int
    levels: tuple[LinkLevel, ...]

    def __post_init__(self) -> None:
        if self.world_size < 1 or not self.levels or self.levels[0].ranks != 1:
            raise ValueError(
                f"{self.world_size} ranks, levels {[level.name for level in self.levels]}: at least one rank "
                "and a first level of single ranks wanted"
            )
        for inner, outer in zip(self.levels, self.levels[1:], strict=False):
            if outer.ranks <= inner.ranks or outer.ranks % inner.ranks:
                raise ValueError(
                    f"level '{outer.name}' of {outer.ranks} ranks is not made of several whole "
                    f"'{inner.name}' of {inner.ranks}"
                )

    @classmethod
    def of_nodes(
        cls, world_size: int, ranks_per_node: int, inside: float, between: float, latency: float = 0.0
    ) -> LinkTopology:
        """Nodes of ``ranks_per_node``: a rank receives ``inside`` bytes a second from its node, a node
        ``between`` from other nodes."""
        levels = [LinkLevel("rank", 1, inside)]
        if ranks_per_node > 1:
            levels.append(LinkLevel("node", ranks_per_node, between, latency))
        elif between < inside:
            levels = [LinkLevel("rank", 1, between, latency)]
        return cls(world_size, tuple(levels))
