"""What the ranks exchange in fewer bytes, and which of them share a node."""

from __future__ import annotations

from typing import Literal

from .policy import Policy, Positive

CodeDtype = Literal["int8", "int4"]


class CommunicationPolicy(Policy):
    """Which ranks share fast links, and how parameters and gradients travel between them (ZeRO++, Wang et
    al., arXiv 2306.10209; MiCS, Zhang et al., arXiv 2205.00119).

    Attributes:
        ranks_per_node: ranks of a node, consecutive ones; must divide their number. None takes
            `LOCAL_WORLD_SIZE` where a launcher set it alike everywhere and it divides the number of ranks,
            else all ranks form one node.
        quantized_weights: codes in which parameters are gathered in stage 3, a scale for every 256 of them
            (qwZ, section 3.1). Masters and shards stay exact.
        quantized_gradients: codes in which gradients are reduced, in a node and then between nodes, where
            they are sharded: in stages 2 and 3 (qgZ, section 3.3). "int4" or "int8".
        secondary_shards: in stage 3 every node keeps all parameters, a part on each of its ranks, from their
            gather until they change, so that other gathers stay in the node (hpZ, section 3.2).
        sharding_ranks: ranks that share the state in stage 3, consecutive ones; the groups hold replicas of
            it (MiCS). Must divide the number of ranks, and divide `ranks_per_node` or be a multiple. None:
            all ranks.
    """

    ranks_per_node: Positive | None = None
    quantized_weights: CodeDtype | None = None
    quantized_gradients: CodeDtype | None = None
    secondary_shards: bool = False
    sharding_ranks: Positive | None = None
