"""Elements and bytes that the collectives of one step carry: plain, in codes and through nodes, and as signs.

Per step of k micro-batches over P sharded elements (ZeRO, Rajbhandari et al. 2020, section 7): stages 0 and 1
carry 2P, stage 2 (k + 1)P, stage 3 3kP. With gradients reduced once per step (`no_sync`) stage 2 carries 2P
and stage 3 (2k + 1)P. Stage 3 carries less where one gather serves forward and backward: of the unit that
forward ends with, and of embeddings, as backward does not read their rows.

With all of ZeRO++ on (Wang et al., arXiv 2306.10209, section 3) and nodes of equal size, P parameters cross
between nodes as half of their fp16 bytes when they are gathered in int8, not at all when they are gathered
again, and as a quarter when their gradients are reduced in int4: 0.75P against 3P, and scales besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zero_ext.config.buffer_sizes import payload_bytes, sign_payload_bytes
from zero_ext.config.communication import (
    CODE_BITS,
    CommunicationConfig,
    check_ranks_per_node,
    check_shard_group_size,
)
from zero_ext.config.events import COLLECTIVE_KINDS
from zero_ext.config.full_tensor_costs import DEFAULT_NS_DTYPE, DIRECTION_BYTES
from zero_ext.config.offload import StatePlacement
from zero_ext.plan.state_memory import check_count

SUM_BYTES = 8  # sums over rows and columns are float64


def collective_elements(
    stage: int,
    world_size: int,
    trainable: int,
    *,
    frozen: int = 0,
    gathered_once: int = 0,
    accumulation_steps: int = 1,
    no_sync: bool = False,
) -> dict[str, int]:
    """Return the elements of one step by kind of collective, as the engine's `traffic` counts them.

    Each collective counts its full (padded) buffer once, before the factor (N - 1) / N. Frozen parameters
    are gathered in stage 3 only and never reduced. Norms and flags (`scalars`) are not included.

    Source: ZeRO, Rajbhandari et al. (arXiv 1910.02054), section 7.

    Args:
        stage: ZeRO stage.
        world_size: number of ranks.
        trainable: elements that train.
        frozen: elements that do not.
        gathered_once: elements of both that are gathered in forward alone: the unit that forward ends with,
            embeddings, what is frozen with nothing trainable below it.
        accumulation_steps: micro-batches of a step.
        no_sync: gradients are reduced once per step.

    Returns:
        Elements by kind; none on one rank.

    Raises:
        ValueError: a stage, world size or count that does not exist.
    """
    check_count("world_size", world_size, 1)
    for name, elements in (("trainable", trainable), ("frozen", frozen), ("gathered_once", gathered_once)):
        check_count(name, elements, 0)
    check_count("accumulation_steps", accumulation_steps, 1)
    placement = StatePlacement.of_stage(stage)
    if world_size == 1:
        return {}
    reductions = accumulation_steps if placement.grads and not no_sync else 1
    kinds = {"reduce_scatter": reductions * trainable}
    if placement.params:
        kinds["gather"] = accumulation_steps * (2 * (trainable + frozen) - gathered_once)
    elif placement.optimizer:
        kinds["gather_updated"] = trainable
    else:
        kinds["gather_gradients"] = trainable
    return kinds


def bytes_sent(kinds: Mapping[str, int], world_size: int, bytes_per_element: int) -> dict[str, int]:
    """Return the bytes that one rank sends for `collective_elements`.

    Every collective sends all but its own N-th slice. Elements are sent in their own precision: gradients
    that add up in fp32 before they are reduced (stages 0 and 1 with several micro-batches, or `no_sync`) take
    4 bytes each. Ask for them and for the gathers separately then.

    Args:
        kinds: elements by kind.
        world_size: number of ranks.
        bytes_per_element: of an element.

    Returns:
        Bytes by kind.

    Raises:
        ValueError: a world size or count that does not exist.
    """
    check_count("world_size", world_size, 1)
    check_count("bytes_per_element", bytes_per_element, 1)
    return {
        kind: elements * bytes_per_element * (world_size - 1) // world_size
        for kind, elements in kinds.items()
    }


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

    def __mul__(self, count: int) -> Sent:
        return Sent(count * self.all, count * self.crossing)


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
    summed = gradient_bytes or (4 if accumulation_steps > 1 else bytes_per_element)
    reduced = bytes_per_element if StatePlacement.of_stage(stage).grads else summed
    widths = {
        name: reduced if kind.wait == "reduce" else bytes_per_element
        for name, kind in COLLECTIVE_KINDS.items()
    }
    # To the ranks with the same shard in other groups (MiCS, Zhang et al., arXiv 2205.00119).
    groups = world_size // group
    replicas = Sent(groups - 1, groups - max(per_node // group, 1))
    found: dict[str, Sent] = {}
    once = gathered_once or {}
    both = {(numel, 2): count - once.get(numel, 0) for numel, count in units.items()}
    for (numel, passes), count in (both | {(numel, 1): count for numel, count in once.items()}).items():
        sent = _of_unit(stage, group, numel, communication, widths, accumulation_steps, passes)
        if replicas.all:
            shard_bytes = numel // group * bytes_per_element * accumulation_steps
            sent["reduce_scatter"] += replicas * shard_bytes
        for kind, each in sent.items():
            found[kind] = found.get(kind, Sent()) + each * count
    return found


def expert_exchange_bytes(
    tokens: int,
    bytes_per_token: float,
    ep_size: int,
    *,
    recomputed: bool = False,
    ranks_per_node: int | None = None,
) -> Sent:
    """Return what one rank sends of its tokens in a step to the experts of one layer, and of their results.

    An all-to-all exchange sends the rows of the tokens to their experts, and another one returns the results.
    Backward has two as well. Ranks differ with the routing, and this is the mean of the ranks. The numbers of
    rows, which are exchanged before, are left out.

    Source: Lepikhin et al., "GShard" (arXiv 2006.16668), section 3.1.

    Args:
        tokens: of a rank in a step.
        bytes_per_token: bytes of a token's rows: experts per token × width × bytes of an element.
        ep_size: ranks that the experts are spread over.
        recomputed: whether backward runs the layer's forward again.
        ranks_per_node: neighboring ranks of one node. None: all ranks are in one.

    Returns:
        Bytes.

    Raises:
        ValueError: a count that does not exist.
    """
    check_count("tokens", tokens, 0)
    check_count("ep_size", ep_size, 1)
    exchanges = 6 if recomputed else 4
    nbytes = exchanges * tokens * bytes_per_token / ep_size  # to each of the ranks
    inside = min(ranks_per_node or ep_size, ep_size)
    return Sent(round(nbytes * (ep_size - 1)), round(nbytes * (ep_size - inside)))


def matrices_sent(
    elements: int,
    world_size: int,
    ranks_per_node: int | None = None,
    ns_dtype: str = DEFAULT_NS_DTYPE,
) -> Sent:
    """Return what one rank sends of matrices in a step that works on each in full at one rank, its owner.

    Slices go to the owners, and results back. Ranks differ, and this is their mean. Where matrices
    have any owner alike, `elements` are (N - 1)/N of all of them on N ranks.

    Args:
        elements: of slices that belong to other ranks than the owner of their matrix, on all ranks together.
        world_size: number of ranks.
        ranks_per_node: None takes all ranks for those of one node.
        ns_dtype: dtype of the iterations, which slices travel in, "bf16" or "fp32".

    Returns:
        Bytes.
    """
    per_node = ranks_per_node or world_size
    nbytes = 2 * DIRECTION_BYTES[ns_dtype] * elements // world_size
    return Sent(nbytes, nbytes * (world_size - per_node) // max(1, world_size - 1))


def lines_sent(lines: int, world_size: int, ranks_per_node: int | None = None) -> Sent:
    """Return what one rank sends in a step of sums over rows and columns of matrices, as Adafactor makes.

    Args:
        lines: rows and columns of all matrices.
        world_size: number of ranks.
        ranks_per_node: None takes all ranks for those of one node.

    Returns:
        Bytes.
    """
    nbytes = SUM_BYTES * lines
    return Sent(nbytes * (world_size - 1), nbytes * (world_size - (ranks_per_node or world_size)))


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
    nodes, shard, gathers = ranks // per_node, numel // ranks, passes * micro_batches
    once = numel * (2 - passes)
    elements = collective_elements(stage, ranks, numel, gathered_once=once, accumulation_steps=micro_batches)
    found = {}
    for kind, count in elements.items():
        nbytes = bytes_sent({kind: count}, ranks, widths[kind])[kind]
        found[kind] = Sent(nbytes, nbytes * (ranks - per_node) // (ranks - 1))

    def in_codes(bits: int | None, width: int, repeats: int, crossings: int) -> Sent:
        payload = shard * width if bits is None else payload_bytes(shard, bits)
        crossing = payload * (nodes - 1) * crossings
        return Sent(payload * nodes * (per_node - 1) * repeats + crossing, crossing)

    weights, gradients = communication.quantized_weights, communication.quantized_gradients
    secondary = communication.hierarchical_partition and nodes > 1
    if "gather" in found and (weights is not None or secondary):
        bits = None if weights is None else CODE_BITS[weights]
        found["gather"] = in_codes(bits, widths["gather"], gathers, 1 if secondary else gathers)
    if "reduce_scatter" in found and StatePlacement.of_stage(stage).grads and gradients is not None:
        found["reduce_scatter"] = in_codes(CODE_BITS[gradients], 0, micro_batches, micro_batches)
    return found


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
    payload = _payload_bytes(world_size, units)
    # The owner of a part answers every node once, and there one rank tells the others.
    return {
        "onebit_reduce_scatter": Sent(world_size - 1, world_size - per_node) * payload,
        "onebit_all_gather": Sent(nodes - 1 + nodes * (per_node - 1), nodes - 1) * payload,
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
