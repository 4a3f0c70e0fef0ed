"""Elements that the collectives of one step carry (ZeRO, Rajbhandari et al. 2020, section 7).

Per step of k micro-batches over P sharded elements: stages 0 and 1 carry 2P, stage 2 (k + 1)P, stage 3 3kP;
with gradients reduced once per step (`no_sync`) stage 2 carries 2P and stage 3 (2k + 1)P. Stage 3 carries
less where one gather serves forward and backward: of the unit that forward ends with, and of embeddings,
as backward does not read their rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from zero_ext.config.offload import StatePlacement
from zero_ext.plan.state_memory import check_count


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
    check_count("trainable", trainable, 0)
    check_count("frozen", frozen, 0)
    check_count("gathered_once", gathered_once, 0)
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
