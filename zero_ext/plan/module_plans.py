"""A real module before anything runs: its staging buffers, its units for simulations, pools of slots."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zero_ext.comm.process_group import single_rank
from zero_ext.config import ZeroConfig, load_config
from zero_ext.plan.simulation.transformer_cost import ModelCost, UnitCost
from zero_ext.plan.state_memory import check_count
from zero_ext.zero.construction.build_units import device_of
from zero_ext.zero.construction.grouping import owned_parameters, plan_units
from zero_ext.zero.construction.oom_report import plan_staging
from zero_ext.zero.construction.staging_sizes import Staging
from zero_ext.zero.tiling.replace_layers import apply_tiling, plan_tiling

if TYPE_CHECKING:
    from zero_ext.zero.memory.pool_plan import Demand


def model_staging(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: ZeroConfig | Mapping[str, Any] | str | Path | None,
    world_size: int,
) -> Staging:
    """Return the buffers that one rank allocates in `zero_ext.prepare`, before anything runs.

    Both `model` and `optimizer` are left as they are, and best live on the meta device: with `units.tiles`
    they are copied.

    Args:
        model: as for [`prepare`][zero_ext.prepare].
        optimizer: as for `prepare`.
        config: as for `prepare`.
        world_size: number of ranks.

    Returns:
        Sizes of the buffers.

    Raises:
        ValueError: the configuration does not fit the model.
    """
    check_count("world_size", world_size, 1)
    settings = load_config(config)
    settings = settings.replace(batch=settings.batch.resolve(world_size))
    if settings.stage == 3 and settings.units.tiles:
        model, optimizer = copy.deepcopy((model, optimizer))
        apply_tiling(model, optimizer, plan_tiling(model, settings.units.tiles), single_rank())
    owned = owned_parameters(model, settings.precision.dtype)
    ranks = settings.communication.shard_group_size or world_size
    plans = plan_units(model, owned, optimizer, settings, ranks, world_size // ranks)
    return plan_staging(plans, optimizer, settings, device_of(owned))


def model_cost(model: nn.Module, config: ZeroConfig, world_size: int, sequence: int) -> ModelCost:
    """Return the units that `zero_ext.prepare` makes of a module, in the order of registration.

    A token's forward takes 2 FLOPs per parameter of every matrix but embeddings. What attention computes
    besides its matrices, and activations, are not known and count nothing.

    Args:
        model: may be on the meta device.
        config: the configuration.
        world_size: ranks.
        sequence: tokens of a sample.

    Returns:
        Their costs.
    """
    check_count("sequence", sequence, 1)
    settings = config.replace(batch=config.batch.resolve(world_size))
    owned = owned_parameters(model, settings.precision.dtype)
    looked_up = {
        module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    units = []
    for plan in plan_units(model, owned, None, settings, world_size):
        parameters: Sequence[torch.Tensor] = [item.parameter for item in plan.members]
        computed = sum(p.numel() for p in parameters if p.dim() >= 2 and p not in looked_up)
        numel = sum(parameter.numel() for parameter in parameters)
        units.append(UnitCost(plan.spec.name, numel, 2.0 * computed, looked_up=not plan.spec.rereads))
    return ModelCost(type(model).__name__, tuple(units), sequence)


def slot_pool_bytes(demands: Sequence[Demand], classes: int) -> int:
    """Return the bytes of a pool of slots with at most `classes` sizes, chosen for the smallest pool.

    A slot is as large as the largest demand of its class, and a class has as many slots as it has demands at
    its busiest moment. One class is the pool of largest slots that ZeRO-Infinity implementations keep.

    Source: Rajbhandari et al., "ZeRO-Infinity" (arXiv 2104.07857), section 6.2.

    Args:
        demands: bytes and lifetimes of buffers.
        classes: number of sizes.

    Returns:
        Bytes.
    """
    ordered = sorted(demands, key=lambda demand: demand.nbytes)
    sizes = sorted({demand.nbytes for demand in ordered})
    # best[k] for a number of sizes: the smallest pool of at most k classes that holds the demands of these.
    best = [[0] * (classes + 1)]
    for stop in range(1, len(sizes) + 1):
        best.append(
            [0]
            + [
                min(
                    best[start][used - 1] + sizes[stop - 1] * _busiest(ordered, sizes[start], sizes[stop - 1])
                    for start in range(stop)
                    if used > 1 or start == 0
                )
                for used in range(1, classes + 1)
            ]
        )
    return best[-1][-1]


def _busiest(demands: Sequence[Demand], least: int, most: int) -> int:
    """Return the most demands of sizes from ``least`` to ``most`` bytes at one moment."""
    events = sorted(
        event
        for demand in demands
        if least <= demand.nbytes <= most
        for begin, end in demand.when
        for event in ((begin, demand.count), (end, -demand.count))
    )
    live = busiest = 0
    for _, change in events:
        live += change
        busiest = max(busiest, live)
    return busiest
