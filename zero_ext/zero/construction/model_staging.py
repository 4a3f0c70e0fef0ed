"""Staging of a model: its units as input of ``staging_of``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from zero_ext.config import ZeroConfig
from zero_ext.offload import CPU
from zero_ext.optim import moments_dtype_named, state_kinds
from zero_ext.optim.elementwise_check import fusible, streamable
from zero_ext.zero.construction.build_units import layout_of
from zero_ext.zero.construction.grouping import (
    OwnedParameter,
    UnitPlan,
    find_blocks,
    trained_by,
    uses_up_gradients,
)
from zero_ext.zero.memory.pool_replay import UnitUsage
from zero_ext.zero.memory.staging_sizes import Staging, StateStep, gradient_spans, staging_of
from zero_ext.zero.tiling import Tile
from zero_ext.zero.unshard.hook_installation import looks_up


def plan_staging(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    plans: Sequence[UnitPlan],
    owned: Sequence[OwnedParameter],
    config: ZeroConfig,
    replicas: int = 1,
    device: torch.device = CPU.device,
) -> Staging:
    """Return the staging of one rank of ``model``, whose parameters ``owned`` form the units ``plans``.

    The ranks that share a unit's state have as many ``replicas``. ``optimizer`` is None for inference;
    ``config.batch`` is resolved.
    """
    return staging_of(
        _staged_units(model, optimizer, plans, owned, config, replicas),
        config,
        None if optimizer is None else _state_step(optimizer, config),
        used_up=uses_up_gradients(config, (item.spec.dtype for item in owned)),
        accelerated=device.type != "cpu",
    )


def _state_step(optimizer: torch.optim.Optimizer, config: ZeroConfig) -> StateStep:
    kinds = state_kinds(optimizer, moments_dtype_named(config.precision.moments_dtype))
    sizes = (torch.float32.itemsize, *(field.dtype.itemsize for field in kinds.values()))
    return StateStep(fusible(optimizer), streamable(optimizer), sizes)


def _staged_units(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    plans: Sequence[UnitPlan],
    owned: Sequence[OwnedParameter],
    config: ZeroConfig,
    replicas: int,
) -> list[UnitUsage]:
    inside: dict[nn.Module, list[int]] = {}
    for number, item in enumerate(owned):
        for owner in item.owners:
            inside.setdefault(owner, []).append(number)

    def span(module: nn.Module) -> tuple[int, int]:
        numbers = [number for inner in module.modules() for number in inside.get(inner, ())]
        return min(numbers), max(numbers)

    blocks = [block for block in find_blocks(model, config).values() if any(True for _ in block.parameters())]
    block_of = {inner: span(block) for block in reversed(blocks) for inner in block.modules()}
    spans = gradient_spans([_block_span(number, item, block_of) for number, item in enumerate(owned)])
    span_of = {item.parameter: found for item, found in zip(owned, spans, strict=True)}
    trains, found = trained_by(optimizer), []
    for plan in plans:
        own = [span_of[item.parameter] for item in plan.members]
        layout = layout_of(plan)
        grads_start = max(last for _, last in own)
        gathered = span(plan.module) if plan.module is not None else (min(own)[0], grads_start)
        grads_end = min(own) if trains(plan) and layout.dtype.is_floating_point else None
        found.append(
            UnitUsage(
                plan.name,
                layout.numel,
                layout.dtype.itemsize,
                plan.ranks,
                plan.placement,
                gathered,
                grads_start,
                grads_end,
                replicas,
                layout.dtype.is_floating_point,
                not all(looks_up(owner) for item in plan.members for owner in item.owners),
                sum(item.spec.numel for item in plan.members if len(item.owners) > 1) * layout.dtype.itemsize,
                max(item.spec.numel for item in plan.members) * layout.dtype.itemsize,
            )
        )
    return found


def _block_span(
    number: int, item: OwnedParameter, block_of: Mapping[nn.Module, tuple[int, int]]
) -> tuple[int, int] | None:
    """Return first and last parameter of the item's block. Tiles come one after another."""
    if all(isinstance(owner, Tile) for owner in item.owners):
        return number, number
    return block_of.get(item.owners[0]) if len(item.owners) == 1 else None
