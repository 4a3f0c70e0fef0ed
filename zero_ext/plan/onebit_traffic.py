"""Bytes that an exchange of signs sends, in place of gradients (Tang et al., arXiv 2102.02888, section 5)."""

from __future__ import annotations

from collections.abc import Mapping

from zero_ext.config.buffer_sizes import sign_payload_bytes
from zero_ext.config.communication import check_ranks_per_node
from zero_ext.plan.state_memory import check_count
from zero_ext.plan.zeropp_traffic import Sent


def onebit_step_bytes(
    world_size: int, units: Mapping[int, int], *, ranks_per_node: int | None = None
) -> dict[str, Sent]:
    """Return what one rank sends in a step of a one-bit optimizer that exchanges signs.

    As the engine's `traffic` counts it; norms and flags are left out. Steps of the warm-up send what
    [`step_bytes`][zero_ext.plan.step_bytes] returns, local steps of `ZeroOneAdam` nothing.

    Source: Tang et al., "1-bit Adam" (arXiv 2102.02888), section 5.

    Args:
        world_size: number of ranks.
        units: how many have a flat buffer of so many elements, padding included.
        ranks_per_node: None takes all ranks for those of one node.

    Returns:
        Bytes by kind of collective; none on one rank.

    Raises:
        ValueError: a world size that does not exist, or nodes that the ranks do not fill.
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
    """Return what 1-bit Adam keeps on a rank besides Adam's state, from its first exchange of signs on.

    It keeps the errors of compression, in stage 1 the parameters in float32, and payloads while they are
    sent.

    Args:
        stage: ZeRO stage.
        world_size: number of ranks.
        units: how many have a flat buffer of so many elements, padding included.

    Returns:
        Bytes; 0 on one rank.

    Raises:
        ValueError: a world size that does not exist.
    """
    check_count("world_size", world_size, 1)
    if world_size == 1:
        return 0
    elements = sum(numel * count for numel, count in units.items())
    stored = 8 * elements if stage == 1 else 4 * elements + 4 * elements // world_size
    return stored + 2 * world_size * _payload_bytes(world_size, units)


def _payload_bytes(world_size: int, units: Mapping[int, int]) -> int:
    """Return bytes of the signs of one rank's parts of all units."""
    return sum(count * sign_payload_bytes(numel // world_size) for numel, count in units.items())
