"""Bytes that a step's collectives send, in codes and through nodes (ZeRO++, Wang et al., arXiv 2306.10209).

With all on and nodes of equal size, P parameters cross between nodes as half of their fp16 bytes when they
are gathered in int8, not at all when they are gathered again, and as a quarter when their gradients are
reduced in int4: 0.75P against 3P, and scales besides (section 3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from zero_ext.config.buffer_sizes import payload_bytes
from zero_ext.config.communication import (
    CODE_BITS,
    CommunicationConfig,
    check_ranks_per_node,
    check_shard_group_size,
)
from zero_ext.config.offload import StatePlacement
from zero_ext.plan.comm_volume import bytes_sent, collective_elements
from zero_ext.plan.state_memory import check_count


@dataclass(frozen=True)
class Sent:
    """Bytes that one rank sends in a step.

    Attributes:
        all: all of them.
        crossing: those that go to other nodes.
    """

    all: int = 0
    crossing: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.all + other.all, self.crossing + other.crossing)


def step_bytes(
    stage: int,
    world_size: int,
    units: Mapping[int, int],
    communication: CommunicationConfig,
    *,
    bytes_per_element: int = 2,
    gradient_bytes: int | None = None,
    accumulation_steps: int = 1,
    gathered_once: Mapping[int, int] | None = None,
) -> dict[str, Sent]:
    """Return what one rank sends in a step, as the engine's `traffic` counts it.

    Norms and flags (`scalars`) are left out. Every micro-batch is reduced on its own where gradients are
    sharded. In stages 0 and 1 they add up first.

    Source: ZeRO++, Wang et al. (arXiv 2306.10209), section 3.

    Args:
        stage: ZeRO stage.
        world_size: number of ranks.
        units: those that train: how many have a flat buffer of so many elements, padding included.
        communication: quantization, nodes and sharding groups. All ranks are one node where `ranks_per_node`
            is None.
        bytes_per_element: of parameters.
        gradient_bytes: bytes of an element of gradients that add up; None: 4 if there are several
            micro-batches.
        accumulation_steps: micro-batches of a step.
        gathered_once: those of `units` that stage 3 gathers for forward alone.

    Returns:
        Bytes by kind of collective.

    Raises:
        ValueError: a stage, world size or count that does not exist, ranks that do not fill their nodes, or
            sharding groups that the engine refuses.
    """
    check_count("accumulation_steps", accumulation_steps, 1)
    group, per_node = communication.shard_group_size or world_size, communication.ranks_per_node or world_size
    check_ranks_per_node(per_node, world_size)
    if group != world_size:
        check_shard_group_size(group, world_size, per_node)
        if stage != 3:
            raise ValueError(
                f"communication.shard_group_size: expected stage 3, got {group} in stage {stage}. Set "
                "stage to 3, or remove shard_group_size."
            )
    widths = dict.fromkeys(("gather", "gather_updated"), bytes_per_element)
    summed = gradient_bytes or (4 if accumulation_steps > 1 else bytes_per_element)
    reduced = bytes_per_element if StatePlacement.of_stage(stage).grads else summed
    widths |= dict.fromkeys(("reduce_scatter", "gather_gradients"), reduced)
    replicas = _over_replicas(world_size, group, per_node)
    total: Counter[str] = Counter()
    crossing: Counter[str] = Counter()
    once = gathered_once or {}
    both = {(numel, 2): count - once.get(numel, 0) for numel, count in units.items()}
    for (numel, passes), count in (both | {(numel, 1): count for numel, count in once.items()}).items():
        sent = _of_unit(stage, group, numel, communication, widths, accumulation_steps, passes)
        if replicas.all:
            shard_bytes = numel // group * bytes_per_element * accumulation_steps
            sent["reduce_scatter"] += Sent(shard_bytes * replicas.all, shard_bytes * replicas.crossing)
        for kind, each in sent.items():
            total[kind] += count * each.all
            crossing[kind] += count * each.crossing
    return {kind: Sent(total[kind], crossing[kind]) for kind in total}


def _over_replicas(world_size: int, group: int, per_node: int) -> Sent:
    """Return how often a rank sends its shard's gradient to those with the same shard in other groups (MiCS,
    Zhang et al., arXiv 2205.00119).
    """
    return Sent(world_size // group - 1, world_size // group - max(per_node // group, 1))


def _of_unit(
    stage: int,
    ranks: int,
    numel: int,
    communication: CommunicationConfig,
    widths: Mapping[str, int],
    micro_batches: int,
    passes: int,
) -> dict[str, Sent]:
    """Return what is sent; of a micro-batch's 2 passes ``passes`` gather the unit where it is sharded."""
    per_node = min(communication.ranks_per_node or ranks, ranks)
    found = {}
    once = numel * (2 - passes)
    elements_of = collective_elements(
        stage, ranks, numel, gathered_once=once, accumulation_steps=micro_batches
    )
    for kind, elements in elements_of.items():
        sent = bytes_sent({kind: elements}, ranks, widths[kind])[kind]
        found[kind] = Sent(sent, sent * (ranks - per_node) // (ranks - 1))
    nodes, shard, placement = ranks // per_node, numel // ranks, StatePlacement.of_stage(stage)
    weights, gradients = communication.quantized_weights, communication.quantized_gradients
    secondary = communication.hierarchical_partition and nodes > 1
    if "gather" in found and (weights is not None or secondary):
        payload = shard * widths["gather"] if weights is None else payload_bytes(shard, CODE_BITS[weights])
        inside = payload * nodes * (per_node - 1)
        gathers = passes * micro_batches
        crossing = payload * (nodes - 1) * (1 if secondary else gathers)
        found["gather"] = Sent(inside * gathers + crossing, crossing)
    if "reduce_scatter" in found and placement.grads and gradients is not None:
        payload = payload_bytes(shard, CODE_BITS[gradients])
        crossing = payload * (nodes - 1) * micro_batches
        inside = payload * nodes * (per_node - 1) * micro_batches
        found["reduce_scatter"] = Sent(inside + crossing, crossing)
    return found
