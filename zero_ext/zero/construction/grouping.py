"""Grouping of parameters into units: blocks of the module tree where parameters are sharded, else buckets."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import nn

from zero_ext.comm import Collectives
from zero_ext.config import ZeroConfig
from zero_ext.config.state_placement import StatePlacement, largest_within_ratio
from zero_ext.zero.memory.staging_sizes import bucket_groups
from zero_ext.zero.tiling import Tile
from zero_ext.zero.units.dtensor_local import is_split, local_tensor
from zero_ext.zero.units.flat_layout import ParameterSpec, memory_order
from zero_ext.zero.units.model_parallel_sync import sum_over_model
from zero_ext.zero.units.parameter_marks import expert_ranks, tie_of
from zero_ext.zero.units.quantized_params import is_packed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STACKS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class OwnedParameter:
    """A parameter with its names and the modules that own it.

    ``counted`` is False if another model-parallel rank has it as well and adds its gradient to the norm.
    """

    parameter: nn.Parameter
    names: tuple[str, ...]  # full names, the first one is the parameter's name
    owners: tuple[nn.Module, ...]
    spec: ParameterSpec
    counted: bool = True

    def named_owners(self) -> Iterator[tuple[str, nn.Module]]:
        """Return every full name with its owner."""
        return zip(self.names, self.owners, strict=True)


@dataclass(frozen=True)
class UnitPlan:
    """Parameters of a future unit, the number of ``ranks`` that share it, and the module that needs it."""

    name: str
    members: tuple[OwnedParameter, ...]
    module: nn.Module | None  # None: replicated parameters, which are always in memory
    placement: StatePlacement
    ranks: int
    persistent: bool

    @property
    def expert(self) -> bool:
        """Whether it has experts, which only some of the data-parallel ranks have."""
        return bool(expert_ranks(self.members[0].parameter))


def owned_parameters(model: nn.Module, precision: str) -> list[OwnedParameter]:
    """Return all parameters in registration order, tied ones once, with the dtype they will have."""
    found_owners: dict[nn.Parameter, list[tuple[str, nn.Module]]] = defaultdict(list)
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found_owners[parameter].append((f"{prefix}.{name}" if prefix else name, module))
    found = []
    for parameter, owners in found_owners.items():
        names = tuple(name for name, _ in owners)
        local, dtype = local_tensor(parameter), parameter.dtype
        if precision != "keep" and dtype.is_floating_point and not is_packed(parameter):
            dtype = DTYPES[precision]
        spec = ParameterSpec(names[0], tuple(local.shape), memory_order(local), dtype)
        found.append(OwnedParameter(parameter, names, tuple(module for _, module in owners), spec))
    return found


def mark_counted(
    owned: Sequence[OwnedParameter], model: Collectives | None, tensor_rank: int
) -> list[OwnedParameter]:
    """Return ``owned`` with ``counted`` False where another rank of ``model`` counts the same parameter.

    Tied parameters count on the first of their ranks. Parameters that tensor parallelism does not split count
    on its first rank.
    """
    if model is None:
        return list(owned)
    found = []
    for item in owned:
        tie = tie_of(item.parameter)
        first = tie is None or tie.ranks[0] == model.rank
        split = tensor_rank == 0 or is_split(item.parameter)
        found.append(replace(item, counted=first and split))
    return found


def restrict_to_local_modules(
    model: nn.Module, settings: ZeroConfig, model_ranks: Collectives | None
) -> ZeroConfig:
    """Return ``settings`` without the names in ``units`` that only other model-parallel ranks have.

    A collective of ``model_ranks``. Names that no rank has stay, so that they are refused later.
    """
    units = settings.units
    wanted = sorted({*units.tiles, *units.block_classes, *units.leaf_modules})
    if model_ranks is None or not wanted:
        return settings
    local = {label for name, module in model.named_modules() for label in (name, type(module).__name__)}
    # A layer that is tiled already counts as what it was: prepare may be called again after an error.
    local |= {label.removeprefix("Tiled") for label in local}
    counts = torch.tensor([name in local for name in wanted], dtype=torch.int64, device="cpu")
    sum_over_model(model_ranks, counts, "agreement on the names in units")
    remote = {name for name, count in zip(wanted, counts.tolist(), strict=True) if count} - local
    own = units.model_copy(
        update={
            "tiles": {name: number for name, number in units.tiles.items() if name not in remote},
            "block_classes": tuple(name for name in units.block_classes if name not in remote),
            "leaf_modules": tuple(name for name in units.leaf_modules if name not in remote),
        }
    )
    return settings.replace(units=own)


def find_blocks(model: nn.Module, config: ZeroConfig) -> dict[str, nn.Module]:
    """Return the modules that are gathered as one.

    These are named classes and leaf modules, by default stack entries, and tiles, also those inside another
    block. A leaf module inside a block is gathered with it.

    Raises ``ValueError`` if a configured name matches nothing.
    """
    named = set(config.units.block_classes)
    leaves = set(config.units.leaf_modules)
    unmatched = named | leaves
    blocks: dict[str, nn.Module] = {}

    # A loop, not a recursive closure, which would keep the modules alive until a cycle collection.
    pending = [("", model, False)]
    while pending:
        prefix, module, in_stack = pending.pop()
        labels = {type(module).__name__, prefix}
        chosen = labels & (named | leaves)
        unmatched.difference_update(labels)
        stack = isinstance(module, STACKS)
        if prefix and (chosen or (in_stack and not stack and not named)):
            blocks[prefix] = module
            continue
        for name, child in module.named_children():
            pending.append((f"{prefix}.{name}" if prefix else name, child, stack))
    for prefix, block in blocks.items():  # which is gathered with all that it contains
        for name, inner in block.named_modules(prefix=prefix):
            unmatched.difference_update(leaves & {type(inner).__name__, name})
    if unmatched:
        classes = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(
            f"units.block_classes / units.leaf_modules: {sorted(unmatched)} match no module outside another "
            f"block. The model's classes are {classes}."
        )
    blocks.update((name, module) for name, module in model.named_modules() if isinstance(module, Tile))
    return blocks


class Grouped(Protocol):
    """A unit: parameters, and whether they stay gathered although others are sharded."""

    parameters: tuple[nn.Parameter, ...]
    placement: StatePlacement
    persistent: bool


def first_parameters(owned: Sequence[OwnedParameter], units: Iterable[Grouped]) -> list[int]:
    """Return for each of ``units`` the index of its first parameter in the order of registration.

    It is -1 for sharded units outside blocks: those that stay gathered, the model's own, and those of several
    modules.
    """
    index_of = {item.parameter: index for index, item in enumerate(owned)}
    outside = {
        item.parameter
        for item in owned
        if ("." not in item.names[0] or len(item.owners) > 1)
        and not all(isinstance(owner, Tile) for owner in item.owners)
    }
    return [
        -1
        if unit.persistent or (unit.placement.params and outside.issuperset(unit.parameters))
        else min(index_of[parameter] for parameter in unit.parameters)
        for unit in units
    ]


def uses_up_gradients(config: ZeroConfig, dtypes: Iterable[torch.dtype]) -> bool:
    """Return whether each unit's gradient is freed by its update in backward.

    No check needs all gradients then, and none accumulates over micro-batches.
    """
    return (
        config.offload.update_mode == "in_backward"
        and config.batch.gradient_accumulation_steps == 1
        and not updates_on_trial(config, dtypes)
    )


def updates_on_trial(config: ZeroConfig, dtypes: Iterable[torch.dtype]) -> bool:
    """Return whether updates in backward run before it is known whether gradients are clipped or skipped.

    ``dtypes`` are those of the parameters.
    """
    return config.offload.update_mode == "in_backward" and (
        config.gradient_clipping > 0 or torch.float16 in set(dtypes)
    )


def plan_units(
    model: nn.Module, owned: Iterable[OwnedParameter], config: ZeroConfig, world_size: int
) -> list[UnitPlan]:
    """Group the parameters into units for the configured stage on ``world_size`` ranks.

    Experts may be spread over some of them.
    """
    owned = tuple(owned)
    used_up = uses_up_gradients(config, (item.spec.dtype for item in owned))
    blocks = find_blocks(model, config)  # checks the names also where no unit is a block
    by_spread: dict[int, list[OwnedParameter]] = {0: []}
    for item in owned:
        by_spread.setdefault(len(expert_ranks(item.parameter)), []).append(item)
    plans: list[UnitPlan] = []
    for spread, shared in by_spread.items():
        ranks = world_size // spread if spread else world_size
        placement = StatePlacement.of_stage(config.stage).on_tiers(config.offload).on_ranks(ranks)
        if used_up:
            placement = placement.consuming_gradients(ranks)
        found = _plan_shared(model, shared, config, blocks, placement, ranks)
        plans += [replace(plan, name=f"experts of {plan.name}") if spread else plan for plan in found]
    return plans


def _plan_shared(
    model: nn.Module,
    owned: Sequence[OwnedParameter],
    config: ZeroConfig,
    blocks: dict[str, nn.Module],
    placement: StatePlacement,
    ranks: int,
) -> list[UnitPlan]:
    """Return the units of parameters that the same number of ``ranks`` share."""
    limit = config.units.bucket_elements
    if not placement.params:
        return list(_buckets("bucket", owned, placement, ranks, limit, False))
    small: list[OwnedParameter] = []
    large: list[OwnedParameter] = []
    for item in owned:
        (small if item.spec.numel < config.units.persistence_threshold else large).append(item)
    plans = list(_blocks(model, large, blocks, placement, ranks))
    plans += _buckets("persistent", small, placement.persistent(), ranks, limit, True)
    return plans


def split_optimizer(
    plans: Sequence[UnitPlan], config: ZeroConfig, trains: Callable[[UnitPlan], bool]
) -> list[UnitPlan]:
    """Return the plans with at most ``offload.ratio`` of the trained elements in the optimizer's tier.

    Optimizer state and gradients of the other units stay on the device. Warns if no unit is small enough to
    be offloaded.
    """
    ratio = config.offload.ratio
    if ratio >= 1:
        return list(plans)
    used_up = uses_up_gradients(config, (item.spec.dtype for plan in plans for item in plan.members))

    def near(plan: UnitPlan) -> StatePlacement:
        placement = plan.placement.optimizer_on_device().on_ranks(plan.ranks)
        return placement.consuming_gradients(plan.ranks) if used_up else placement

    trained = [number for number, plan in enumerate(plans) if trains(plan)]
    sizes = [sum(item.spec.numel for item in plans[number].members) for number in trained]
    moved = largest_within_ratio(sizes, ratio)
    if trained and not moved:
        warnings.warn(
            f"offload.ratio: {ratio} keeps the whole optimizer on the device: the smallest unit has "
            f"{min(sizes) / sum(sizes):.3f} of its elements, and units are not split",
            RuntimeWarning,
            stacklevel=2,
        )
    stay = {number for index, number in enumerate(trained) if index not in moved}
    return [
        replace(plan, placement=near(plan)) if number in stay else plan for number, plan in enumerate(plans)
    ]


def trained_by(optimizer: torch.optim.Optimizer | None) -> Callable[[UnitPlan], bool]:
    """Return a test of whether a unit needs master weights: trainable, or in the optimizer's groups."""
    groups = optimizer.param_groups if optimizer is not None else []
    stepped = {parameter for group in groups for parameter in group["params"]}

    def trains(plan: UnitPlan) -> bool:
        parameters = [item.parameter for item in plan.members]
        return optimizer is not None and (parameters[0].requires_grad or not stepped.isdisjoint(parameters))

    return trains


class _Kind(NamedTuple):
    """What the parameters of one unit have in common."""

    dtype: torch.dtype
    trainable: bool
    tie: str  # of a parameter that several ranks of the model have, in a unit that is alike on all of them

    def __str__(self) -> str:
        tied = f", tied as '{self.tie}'" if self.tie else ""
        return (
            f"{str(self.dtype).removeprefix('torch.')}, {'trainable' if self.trainable else 'frozen'}{tied}"
        )


def _kind(item: OwnedParameter) -> _Kind:
    found = tie_of(item.parameter)
    return _Kind(item.spec.dtype, item.parameter.requires_grad, found.name if found is not None else "")


def _buckets(
    label: str,
    owned: Iterable[OwnedParameter],
    placement: StatePlacement,
    ranks: int,
    limit: int,
    persistent: bool,
) -> Iterator[UnitPlan]:
    by_kind: dict[_Kind, list[OwnedParameter]] = defaultdict(list)
    for item in owned:
        by_kind[_kind(item)].append(item)
    number = 0
    for items in by_kind.values():
        for group in bucket_groups([item.spec.numel for item in items], limit):
            members = tuple(items[index] for index in group)
            yield UnitPlan(f"{label}.{number}", members, None, placement, ranks, persistent)
            number += 1


def _blocks(
    model: nn.Module,
    owned: Iterable[OwnedParameter],
    blocks: dict[str, nn.Module],
    placement: StatePlacement,
    ranks: int,
) -> Iterator[UnitPlan]:
    # Tiles are the last of the blocks, and so their own block where another one contains them.
    block_of = {inner: (name, block) for name, block in blocks.items() for inner in block.modules()}
    groups: dict[tuple[str, _Kind], tuple[nn.Module, list[OwnedParameter]]] = {}
    for item in owned:
        tiled = all(isinstance(owner, Tile) for owner in item.owners)
        candidates = {block_of.get(owner) for owner in (item.owners[:1] if tiled else item.owners)}
        only = candidates.pop() if len(candidates) == 1 else None
        if only is not None:
            name, module = only
        elif len(item.owners) == 1:
            name, module = item.names[0].rpartition(".")[0], item.owners[0]
        else:
            name, module = "", model
        groups.setdefault((name, _kind(item)), (module, []))[1].append(item)
    for (name, kind), (module, members) in groups.items():
        label = name or type(model).__name__
        others = [key for key in groups if key[0] == name]
        if len(others) > 1:
            label += f" ({kind})"
        yield UnitPlan(label, tuple(members), module, placement, ranks, False)
