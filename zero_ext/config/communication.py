"""Compressed communication between ranks, and the grouping of ranks into nodes."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from zero_ext.config.base_section import ConfigSection, KeyProblem, Positive
from zero_ext.config.buffer_sizes import payload_bytes
from zero_ext.config.config_errors import show

CodeDtype = Literal["int8", "int4"]
ResolvedReduction = Literal["rank_order", "node_order", "backend"]
Reduction = Literal["auto", "rank_order", "node_order", "backend"]
CODE_BITS: dict[CodeDtype, Literal[4, 8]] = {"int8": 8, "int4": 4}


class CommunicationConfig(ConfigSection):
    """Grouping of ranks by the speed of their links, and formats in which parameters and gradients are sent.

    Source: ZeRO++, Wang et al. (arXiv 2306.10209); MiCS, Zhang et al. (arXiv 2205.00119).

    Attributes:
        ranks_per_node: number of consecutive ranks that form a node. It must divide the number of ranks.
            `null` uses `LOCAL_WORLD_SIZE` if a launcher set it to the same value on all ranks and it divides
            the number of ranks, and otherwise treats all ranks as one node.
        quantized_weights: integer format in which stage 3 gathers parameters, with one scale per block of 256
            elements (qwZ, section 3.1). Master weights and shards stay exact. `null` does not quantize.
        quantized_gradients: integer format in which stages 2 and 3 reduce gradients, first inside each node
            and then between nodes (qgZ, section 3.3). `precision.communication_dtype` and
            `precision.reduction` then have no effect. `null` does not quantize.
        hierarchical_partition: whether each node stores a secondary copy of all parameters in stage 3,
            sharded over its ranks (hpZ, section 3.2). The copy is valid from the gather of a parameter until
            the parameter changes. Other gathers in this time stay inside the node.
        shard_group_size: number of consecutive ranks over which stage 3 shards the state, with one replica
            per group (MiCS). It must divide the number of ranks, and must be a divisor or a multiple of
            `ranks_per_node`. `null` means all ranks.
    """

    ranks_per_node: Positive | None = None
    quantized_weights: CodeDtype | None = None
    quantized_gradients: CodeDtype | None = None
    hierarchical_partition: bool = False
    shard_group_size: Positive | None = None

    @model_validator(mode="after")
    def _groups_hold_replicas(self) -> CommunicationConfig:
        for key in ("quantized_gradients", "hierarchical_partition"):
            value = getattr(self, key)
            if value and self.shard_group_size is not None:
                raise KeyProblem(
                    key,
                    f"got {show(value)} together with shard_group_size = {self.shard_group_size}. Both save "
                    f"the same traffic, and are not combined. Remove {key} or shard_group_size.",
                )
        return self

    def secondary_bytes(self, shard: int, itemsize: int, nodes: int, is_float: bool = True) -> int:
        """Return the bytes of a rank's slice of the secondary copy of parameters that a node stores.

        Args:
            shard: elements of the rank's shard.
            itemsize: bytes of an element.
            nodes: number of nodes.
            is_float: whether the parameters are floating-point, which alone are quantized.

        Returns:
            Bytes, or 0 if nodes store no copy.
        """
        if not self.hierarchical_partition or nodes == 1:
            return 0
        codes = self.quantized_weights if is_float else None
        return nodes * (shard * itemsize if codes is None else payload_bytes(shard, CODE_BITS[codes]))


def resolve_reduction(
    wanted: Reduction,
    world_size: int,
    ranks_per_node: int,
    most: int | None = None,
    backend_adds: bool = False,
) -> ResolvedReduction:
    """Return the algorithm that sums gradients of `world_size` ranks on nodes of `ranks_per_node`.

    `most` is the largest number of ranks' gradients in one sum. `backend_adds` is true if the backend can
    sum in its reduce-scatter. Raises ValueError if the `wanted` algorithm is not possible.
    """
    nodes = world_size // ranks_per_node
    is_hierarchical = nodes > 1 and ranks_per_node > 1
    limit = world_size if most is None else most
    fits: dict[Reduction, bool] = {
        "rank_order": world_size <= limit,
        "node_order": is_hierarchical and max(nodes, ranks_per_node) <= limit,
        "backend": backend_adds,
    }
    exact: tuple[ResolvedReduction, ...] = ("rank_order", "node_order")
    order: dict[Reduction, tuple[ResolvedReduction, ...]] = {
        "auto": ("node_order", *exact, "backend") if backend_adds else exact,
        "rank_order": ("rank_order",),
        "node_order": ("node_order",) if is_hierarchical else ("rank_order",),
        "backend": ("backend",) if backend_adds else exact,
    }
    for strategy in order[wanted]:
        if fits[strategy]:
            return strategy
    raise ValueError(
        f"precision.reduction: expected for '{wanted}' at most {limit} ranks' gradients in one sum on this "
        f"device, got {world_size} ranks on {nodes} nodes. Set it to 'auto'"
        + ("." if backend_adds else ", and start torch.distributed with the device's own backend (NCCL).")
    )


def check_ranks_per_node(ranks_per_node: int, world_size: int) -> None:
    """Raise ValueError if the ranks do not fill their nodes."""
    if world_size % ranks_per_node:
        raise ValueError(
            f"communication.ranks_per_node: expected a divisor of the {world_size} ranks, since nodes are "
            f"equally large, got {ranks_per_node}. Set it to a divisor of {world_size}, or start another "
            "number of ranks."
        )


def check_shard_group_size(ranks: int, world_size: int, ranks_per_node: int) -> None:
    """Raise ValueError if sharding groups do not fill the world, or nodes and groups overlap."""
    if ranks == 1:
        problem = "expected at least 2, got 1, which shards nothing. Set stage to 0."
    elif world_size % ranks:
        problem = f"expected a divisor of the {world_size} ranks, got {ranks}. Set it to a divisor of them."
    elif ranks % ranks_per_node and ranks_per_node % ranks:
        problem = (
            f"expected a divisor or a multiple of the {ranks_per_node} ranks of a node, got {ranks}. Set "
            "it to one of them."
        )
    else:
        return
    raise ValueError(f"communication.shard_group_size: {problem}")
