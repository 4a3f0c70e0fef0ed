"""Bytes that an exchange of signs sends, in place of gradients (Tang et al., arXiv 2102.02888, section 5)."""

from __future__ import annotations

from collections.abc import Mapping

from zero_ext.config.quantization_blocks import sign_payload_bytes
from zero_ext.config.sections.communication import check_ranks_per_node
from zero_ext.plan.state_memory import check_count
from zero_ext.plan.zeropp_traffic import Sent


def onebit_step_bytes(
    world_size: int, units: Mapping[int, int], *, ranks_per_node: int | None = None
) -> dict[str, Sent]:
    """What one of `world_size` ranks sends in a step of `zero_ext.OneBitAdam`, `ZeroOneAdam` or `OneBitLamb`
    that exchanges signs, by kind, as `zero_ext.comm.TrafficStats` counts it; norms and flags left out.

    Steps of their warm-up send what :func:`zero_ext.plan.step_bytes` says, local steps of `ZeroOneAdam`
    nothing. `units` are as there; None takes all ranks for those of one node. Raises ValueError for a world
    size that does not exist, and for nodes that the ranks do not fill.
    """
    check_count("world_size", world_size, 1)
    per_node = ranks_per_node or world_size
    check_ranks_per_node(per_node, world_size)
    if world_size == 1:
        return {}
    nodes = world_size // per_node
    # The owner of a part answers every node once, and there one rank tells the others.
    to_owners = Sent(world_size - 1, world_size - per_node)
    to_all = Sent(nodes - 1 + nodes * (per_node - 1), nodes - 1)
    payload = _payload_bytes(world_size, units)
    return {
        "onebit_reduce_scatter": Sent(payload * to_owners.all, payload * to_owners.crossing),
        "onebit_all_gather": Sent(payload * to_all.all, payload * to_all.crossing),
    }


def onebit_state_bytes(stage: int, world_size: int, units: Mapping[int, int]) -> int:
    """What 1-bit Adam keeps on a rank beside Adam's state from its first exchange of signs on: errors, in
    stage 1 the parameters in float32; and its messages, which are there while they travel."""
    check_count("world_size", world_size, 1)
    if world_size == 1:
        return 0
    elements = sum(numel * count for numel, count in units.items())
    stored = 8 * elements if stage == 1 else 4 * elements + 4 * elements // world_size
    return stored + 2 * world_size * _payload_bytes(world_size, units)


def _payload_bytes(world_size: int, units: Mapping[int, int]) -> int:
    """Bytes of the signs of one rank's parts of all units."""
    return sum(count * sign_payload_bytes(numel // world_size) for numel, count in units.items())
