"""Exchanges between ranks in fewer bytes, and the ranks that share a node."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from zero_ext.config.quantization_blocks import payload_bytes
from zero_ext.config.schema.base_section import ConfigSection, KeyProblem, Positive
from zero_ext.config.schema.config_errors import show

CodeDtype = Literal["int8", "int4"]
ResolvedReduction = Literal["rank_order", "node_order", "backend"]
Reduction = Literal["auto", "rank_order", "node_order", "backend"]
CODE_BITS: dict[CodeDtype, Literal[4, 8]] = {"int8": 8, "int4": 4}


class CommunicationConfig(ConfigSection):
    """Fast links between ranks, and how parameters and gradients are sent over them.

    Source: ZeRO++, Wang et al. (arXiv 2306.10209); MiCS, Zhang et al. (arXiv 2205.00119).

    Attributes:
        ranks_per_node: ranks of a node, consecutive ones; must divide their number. None takes
            `LOCAL_WORLD_SIZE` where a launcher set it alike everywhere and it divides the number of ranks,
            else all ranks form one node.
        quantized_weights: codes in which parameters are gathered in stage 3, a scale for every 256 of them
            (qwZ, section 3.1). Masters and shards stay exact.
        quantized_gradients: codes in which gradients are reduced, in a node and then between nodes, where
            they are sharded: in stages 2 and 3 (qgZ, section 3.3). `precision.communication_dtype` and
            `precision.reduction` have no say then.
        hierarchical_partition: in stage 3 every node keeps a secondary copy of all parameters, sharded over
            its ranks, from their gather until they change. Other gathers then stay in the node (hpZ,
            section 3.2).
        shard_group_size: ranks that share the state in stage 3, consecutive ones; the groups hold replicas of
            it (MiCS). Must divide the number of ranks, and divide `ranks_per_node` or be a multiple. None:
            all ranks.
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
        """Return the bytes of a rank's slice of the second copy of parameters that a node keeps.

        Args:
            shard: elements of the rank's shard.
            itemsize: bytes of an element.
            nodes: number of nodes.
            is_float: whether the parameters are floating-point, which alone are quantized.

        Returns:
            Bytes; 0 where no node keeps a copy.
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
    """Return how gradients of `world_size` ranks on nodes of `ranks_per_node` are added up.

    `most` is how many ranks' gradients one sum can hold, `backend_adds` whether the backend can add
    them in its reduce-scatter. Raises ValueError if what is `wanted` cannot be done.
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
    """Raise ValueError where ranks do not fill their nodes."""
    if world_size % ranks_per_node:
        raise ValueError(
            f"communication.ranks_per_node: expected a divisor of the {world_size} ranks, since nodes are "
            f"equally large, got {ranks_per_node}. Set it to a divisor of {world_size}, or start another "
            "number of ranks."
        )


def check_shard_group_size(ranks: int, world_size: int, ranks_per_node: int) -> None:
    """Raise ValueError where sharding groups do not fill the world, or nodes and groups overlap."""
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
