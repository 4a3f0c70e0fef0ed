"""The links between ranks, in levels from inside a node outwards, and the traffic of a step on each axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from zero_ext.config.offload import StatePlacement


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
        for inner, outer in pairwise(self.levels):
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


@dataclass(frozen=True)
class AxisTraffic:
    """The exchanges along one axis in one step.

    Attributes:
        pattern: "collective": operations over all ranks of the axis, on `nbytes` bytes in total; every
            rank ends up with each byte or contributes to it (an all-reduce counts twice: a reduce-scatter and
            a gather). "neighbor": every rank but the last sends `nbytes` bytes to the one that follows it,
            and as many come back.
        nbytes: bytes.
        messages: number of exchanges, for their latency.
    """

    pattern: Literal["collective", "neighbor"]
    nbytes: float
    messages: int = 0


@dataclass(frozen=True)
class TransformerStep:
    """The sizes of one step of a transformer.

    Attributes:
        parameters: of the model.
        layers: of the model.
        hidden: width of a layer.
        sequence: tokens of a sequence.
        micro_batch: sequences of a micro-batch.
        micro_batches: micro-batches per replica.
        itemsize: bytes of an element.
        recomputes: the forward of a layer runs again in backward.
    """

    parameters: float
    layers: int
    hidden: int
    sequence: int
    micro_batch: int = 1
    micro_batches: int = 1
    itemsize: int = 2
    recomputes: bool = True


def transformer_traffic(
    sizes: Mapping[str, int], step: TransformerStep, stage: int
) -> dict[str, AxisTraffic]:
    """Return the traffic of `step` on each axis.

    Tensor parallelism: two all-reduces of the activations per layer in forward and in backward each, and in a
    recomputed forward (Shoeybi et al., arXiv 1909.08053, section 3). Sequence parallelism: four all-to-alls
    of a rank's activations, in forward, backward and a recomputed forward (Jacobs et al., arXiv 2309.14509,
    section 3.2). Pipeline: a micro-batch's activations to the next stage, their gradient back. Data: the
    gradients reduced, and parameters gathered, per step where they are not sharded, per micro-batch where
    they are.

    Args:
        sizes: ranks along "pp", "dp", "cp" and "tp".
        step: what is computed.
        stage: ZeRO stage.

    Returns:
        Traffic by axis of `sizes`.

    Raises:
        ValueError: `sizes` has an axis "ep".
    """
    if "ep" in sizes:
        raise ValueError(
            "axis 'ep': the traffic of experts depends on the model and is not counted. Leave the axis out."
        )
    tp, pp, cp = (sizes.get(axis, 1) for axis in ("tp", "pp", "cp"))
    own_layers = step.layers / pp
    activation = step.itemsize * step.hidden * step.sequence * step.micro_batch / cp
    passes = (3 if step.recomputes else 2) * own_layers * step.micro_batches
    own_parameters = step.itemsize * step.parameters / (tp * pp)
    gathers = 2 * step.micro_batches if StatePlacement.of_stage(stage).params else 1
    found = {
        "tp": AxisTraffic("collective", 2 * 2 * passes * activation, round(2 * passes)),
        "cp": AxisTraffic("collective", 4 * passes * activation / tp, round(4 * passes)),
        "pp": AxisTraffic("neighbor", step.micro_batches * activation, 2 * step.micro_batches),
        "dp": AxisTraffic("collective", (1 + gathers) * own_parameters, round((1 + gathers) * own_layers)),
    }
    return {axis: found[axis] for axis in sizes}
