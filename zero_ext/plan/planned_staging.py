"""Staging of a rank before anything runs: the very plan that ``prepare`` allocates by."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_ext.comm.process_group import single_rank
from zero_ext.config import ZeroConfig, load_config
from zero_ext.plan.state_memory import check_count
from zero_ext.zero.construction.build_units import device_of
from zero_ext.zero.construction.grouping import owned_parameters, plan_units
from zero_ext.zero.construction.oom_report import plan_staging
from zero_ext.zero.construction.staging_sizes import Staging
from zero_ext.zero.tiling.replace_layers import apply_tiling, plan_tiling


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
