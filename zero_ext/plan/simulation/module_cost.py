"""A real module by its units."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from zero_ext.config import ZeroConfig
from zero_ext.plan.simulation.transformer_cost import ModelCost, UnitCost
from zero_ext.plan.state_memory import check_count
from zero_ext.zero.construction.grouping import owned_parameters, plan_units


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
