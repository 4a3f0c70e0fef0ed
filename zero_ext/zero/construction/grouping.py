"""Grouping of parameters into units: blocks of the module tree where parameters are sharded, else buckets."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from zero_ext.comm import Collectives
from zero_ext.config import ZeroConfig
from zero_ext.config.offload import StatePlacement
from zero_ext.config.tiers import TIERS
from zero_ext.optim.optimizer_registry import update_rule
from zero_ext.zero.construction.staging_sizes import bucket_groups, gradient_spans
from zero_ext.zero.memory.gathered_unit import UnitSpec
from zero_ext.zero.tiling import Tile
from zero_ext.zero.units.dtensor_local import is_split, local_tensor
from zero_ext.zero.units.expert_ranges import is_stacked
from zero_ext.zero.units.flat_layout import FlatLayout, ParameterSpec, memory_order
from zero_ext.zero.units.parameter_marks import expert_ranks, is_packed, restore_expert_marks, tie_of
from zero_ext.zero.units.presharded import presharded_of
from zero_ext.zero.units.rank_groups import sum_over_model
from zero_ext.zero.unshard.expert_routing import stacked_experts
from zero_ext.zero.unshard.hook_installation import looks_up

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

    @property
    def tiled(self) -> bool:
        """Return whether it belongs to tiles only."""
        return all(isinstance(owner, Tile) for owner in self.owners)


@dataclass(frozen=True)
class UnitPlan:
    """A future unit: its description, layout, parameters, and the module that needs it."""

    spec: UnitSpec
    layout: FlatLayout
    members: tuple[OwnedParameter, ...]
    module: nn.Module | None  # None: replicated parameters, which are always in memory

    @property
    def expert(self) -> bool:
        """Return whether it has experts, which only some of the data-parallel ranks have."""
        return bool(expert_ranks(self.members[0].parameter))


def owned_parameters(model: nn.Module, precision: str) -> list[OwnedParameter]:
    """Return all parameters in registration order, tied ones once, with the dtype they will have, and the
    strides that presharded ones had before they were sharded. Marks of experts are restored."""
    restore_expert_marks(model)
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
        presharded = presharded_of(parameter)
        stride = memory_order(local) if presharded is None else presharded.spec.stride
        spec = ParameterSpec(names[0], tuple(local.shape), stride, dtype)
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

    def counts(parameter: nn.Parameter) -> bool:
        tie = tie_of(parameter)
        return (tie is None or tie.ranks[0] == model.rank) and (tensor_rank == 0 or is_split(parameter))

    return [replace(item, counted=counts(item.parameter)) for item in owned]


def restrict_to_local_modules(
    model: nn.Module, settings: ZeroConfig, model_ranks: Collectives | None
) -> ZeroConfig:
    """Return ``settings`` without the names in ``units`` that only other model-parallel ranks have.

    A collective of ``model_ranks``. Names that no rank has stay, so that they are refused later.
    """
    units = settings.units
    # The names are sorted because the ranks add up counts by position, and the order of a set of
    # strings differs between processes.
    wanted = sorted({*units.tiles, *units.block_classes, *units.leaf_modules})
    if model_ranks is None or not wanted:
        return settings
    local = {label for name, module in model.named_modules() for label in (name, type(module).__name__)}
    # A layer that is tiled already counts as what it was: prepare may be called again after an error.
    local |= {label.removeprefix("Tiled") for label in local}
    counts = torch.tensor([name in local for name in wanted], dtype=torch.int64, device="cpu")
    sum_over_model(model_ranks, counts, "agreement on the names in units")
    remote = {name for name, count in zip(wanted, counts.tolist(), strict=True) if count} - local
    own = {"tiles": {name: number for name, number in units.tiles.items() if name not in remote}} | {
        key: tuple(name for name in getattr(units, key) if name not in remote)
        for key in ("block_classes", "leaf_modules")
    }
    return settings.replace(units=units.model_copy(update=own))


def find_blocks(model: nn.Module, config: ZeroConfig) -> dict[str, nn.Module]:
    """Return the modules that are gathered as one.

    These are named classes and leaf modules, by default stack entries, and tiles and routed experts, also
    those inside another block. A leaf module inside a block is gathered with it. A mixture of experts outside
    of any block is one, as each rank calls the experts that its own tokens are routed to.

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
        by_default = (in_stack and not stack and not named) or (
            has_listed_experts(module) and not _has_named_inside(prefix, module, named | leaves)
        )
        if prefix and (chosen or by_default):
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
            "units.block_classes / units.leaf_modules: expected names of modules or classes outside "
            f"another block, got {sorted(unmatched)}. Choose among the model's classes: {classes}."
        )
    if config.stage == 3 and config.units.experts == "routed":
        blocks.update(routed_experts(model))
    blocks.update((name, module) for name, module in model.named_modules() if isinstance(module, Tile))
    return blocks


def routed_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with stacked experts that are gathered one by one with units.experts "routed"."""
    return {name: module for name, module in model.named_modules() if name and stacked_experts(module)}


def has_listed_experts(module: nn.Module) -> bool:
    """Return whether ``module`` has a list of experts and a router to them: a matrix of its own, or of a
    module right inside, with a row per entry and as wide as their inputs. An embedding is no router. Experts
    have equal parameters and, other than the layers of a stack, no norms."""
    children = list(module.children())
    owners = [each for each in (module, *children) if not isinstance(each, nn.Embedding)]
    matrices = [each for owner in owners for each in owner.parameters(recurse=False)]
    routers = {tuple(matrix.shape) for matrix in matrices if matrix.dim() == 2}
    for child in children:
        entries = list(child.children()) if isinstance(child, nn.ModuleList | nn.ModuleDict) else []
        shapes = {tuple((name, p.shape) for name, p in entry.named_parameters()) for entry in entries}
        if len(entries) < 2 or len(shapes) > 1 or not _has_matrices_alone(entries[0]):
            continue
        widths = next(each.shape for each in entries[0].parameters() if each.dim() >= 2)
        if any((len(entries), width) in routers for width in widths):
            return True
    return False


def _has_matrices_alone(module: nn.Module) -> bool:
    """Return whether all modules with parameters inside have a matrix. A norm has none."""
    owners = [list(each.parameters(recurse=False)) for each in module.modules()]
    return any(owners) and all(any(p.dim() >= 2 for p in own) for own in owners if own)


def _has_named_inside(prefix: str, module: nn.Module, names: set[str]) -> bool:
    """Return whether the configuration names a module inside ``module``, or its class."""
    inner = (each for each in module.named_modules(prefix=prefix) if each[1] is not module)
    return any(names & {name, type(each).__name__} for name, each in inner)


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
    model: nn.Module,
    owned: Sequence[OwnedParameter],
    optimizer: torch.optim.Optimizer | None,
    config: ZeroConfig,
    world_size: int,
    replicas: int = 1,
) -> list[UnitPlan]:
    """Group the parameters into units for the configured stage on ``world_size`` ranks.

    At most ``offload.ratio`` of the trained elements are in the optimizer's tier. Optimizer state and
    gradients of the other units stay on the device. Warns if no unit is small enough to be offloaded.

    Args:
        owned: All parameters of ``model`` in the order of registration. Experts may be on some ranks only.
        optimizer: The optimizer that trains them, None for inference.
        replicas: Groups of ``world_size`` ranks that each have all shards.
    """
    used_up = uses_up_gradients(config, (item.spec.dtype for item in owned))
    by_spread: dict[int, list[OwnedParameter]] = {0: []}
    for item in owned:
        by_spread.setdefault(len(expert_ranks(item.parameter)), []).append(item)
    planner = _UnitPlanner(model, owned, optimizer, config, replicas)
    plans: list[UnitPlan] = []
    for spread, shared in by_spread.items():
        ranks = world_size // spread if spread else world_size
        placement = StatePlacement.of_stage(config.stage).on_tiers(config.offload).on_ranks(ranks)
        if used_up:
            placement = placement.consuming_gradients(ranks)
        plans += planner.plans(shared, placement, ranks)
    return _split_optimizer(plans, config.offload.ratio, used_up)


def _split_optimizer(plans: list[UnitPlan], ratio: float, used_up: bool) -> list[UnitPlan]:
    """Return the plans with at most ``ratio`` of the trained elements in the optimizer's tier."""
    if ratio >= 1:
        return plans

    def on_device(plan: UnitPlan) -> UnitPlan:
        ranks = plan.spec.world_size
        placement = plan.spec.placement.optimizer_on_device().on_ranks(ranks)
        placement = placement.consuming_gradients(ranks) if used_up else placement
        return replace(plan, spec=replace(plan.spec, placement=placement))

    trained = [number for number, plan in enumerate(plans) if plan.spec.trained]
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
    return [on_device(plan) if number in stay else plan for number, plan in enumerate(plans)]


class _Kind(NamedTuple):
    """The properties that the parameters of one unit share."""

    dtype: torch.dtype
    trainable: bool
    tie: str  # of a parameter that several ranks of the model have, in a unit that is alike on all of them
    rule: str  # of an optimizer that steps parameters in several ways

    def __str__(self) -> str:
        tied = f", tied as '{self.tie}'" if self.tie else ""
        ruled = f", {self.rule}" if self.rule else ""
        trained = "trainable" if self.trainable else "frozen"
        return f"{str(self.dtype).removeprefix('torch.')}, {trained}{tied}{ruled}"


class _UnitPlanner:
    """Plans the units of a model, with the parameters at which a step begins and ends to use each."""

    def __init__(
        self,
        model: nn.Module,
        owned: Sequence[OwnedParameter],
        optimizer: torch.optim.Optimizer | None,
        config: ZeroConfig,
        replicas: int,
    ) -> None:
        self._model, self._config, self._replicas = model, config, replicas
        self._blocks = find_blocks(model, config)  # checks the names also where no unit is a block
        self._optimizer = optimizer
        self._rules: dict[nn.Parameter, str] = {}
        if optimizer is not None:
            for group in optimizer.param_groups:
                self._rules |= dict.fromkeys(group["params"], update_rule(optimizer, group))
        self._numbers: dict[nn.Module, list[int]] = defaultdict(list)  # of the parameters of a module itself
        for number, item in enumerate(owned):
            for owner in item.owners:
                self._numbers[owner].append(number)
        blocks = [block for block in self._blocks.values() if any(True for _ in block.parameters())]
        block_of = {inner: self._span(block) for block in reversed(blocks) for inner in block.modules()}
        self._number = {item.parameter: number for number, item in enumerate(owned)}
        spans = [block_of.get(item.owners[0]) if len(item.owners) == 1 else None for item in owned]
        # Tiles come one after another.
        self._grad_spans = gradient_spans(
            [(number, number) if item.tiled else spans[number] for number, item in enumerate(owned)]
        )
        self._outside = {
            item.parameter
            for item in owned
            if ("." not in item.names[0] or len(item.owners) > 1) and not item.tiled
        }

    def plans(
        self, owned: Sequence[OwnedParameter], placement: StatePlacement, ranks: int
    ) -> Iterator[UnitPlan]:
        """Yield the units of parameters that the same number of ``ranks`` share."""
        if not placement.params:
            yield from self._buckets("bucket", owned, placement, ranks)
            return
        threshold = self._config.units.persistence_threshold
        large = [item for item in owned if item.spec.numel >= threshold]
        small = [item for item in owned if item.spec.numel < threshold]
        yield from self._block_units(large, placement, ranks)
        yield from self._buckets("persistent", small, placement.persistent(), ranks, persistent=True)

    def _kind(self, item: OwnedParameter) -> _Kind:
        tie, rule = tie_of(item.parameter), self._rules.get(item.parameter, "")
        return _Kind(item.spec.dtype, item.parameter.requires_grad, tie.name if tie is not None else "", rule)

    def _buckets(
        self,
        label: str,
        owned: Iterable[OwnedParameter],
        placement: StatePlacement,
        ranks: int,
        persistent: bool = False,
    ) -> Iterator[UnitPlan]:
        by_kind: dict[_Kind, list[OwnedParameter]] = defaultdict(list)
        for item in owned:
            by_kind[self._kind(item)].append(item)
        limit, number = self._config.units.bucket_elements, 0
        for items in by_kind.values():
            for group in bucket_groups([item.spec.numel for item in items], limit):
                members = [items[index] for index in group]
                yield self._plan(f"{label}.{number}", members, None, placement, ranks, persistent)
                number += 1

    def _block_units(
        self, owned: Iterable[OwnedParameter], placement: StatePlacement, ranks: int
    ) -> Iterator[UnitPlan]:
        # Tiles are the last of the blocks, and so their own block where another one contains them.
        block_of = {inner: (name, block) for name, block in self._blocks.items() for inner in block.modules()}
        groups: dict[tuple[str, _Kind], tuple[nn.Module, list[OwnedParameter]]] = {}
        for item in owned:
            candidates = {block_of.get(owner) for owner in (item.owners[:1] if item.tiled else item.owners)}
            only = candidates.pop() if len(candidates) == 1 else None
            if only is not None:
                name, module = only
            elif len(item.owners) == 1:
                name, module = item.names[0].rpartition(".")[0], item.owners[0]
            else:
                name, module = "", self._model
            groups.setdefault((name, self._kind(item)), (module, []))[1].append(item)
        for (name, kind), (module, members) in groups.items():
            label = name or type(self._model).__name__
            if sum(other == name for other, _ in groups) > 1:
                label += f" ({kind})"
            yield self._plan(label, members, module, placement, ranks)

    def _plan(
        self,
        name: str,
        members: Sequence[OwnedParameter],
        module: nn.Module | None,
        placement: StatePlacement,
        ranks: int,
        persistent: bool = False,
    ) -> UnitPlan:
        parameters = [item.parameter for item in members]
        numbers = [self._number[parameter] for parameter in parameters]
        spans = [self._grad_spans[number] for number in numbers]
        alignment = TIERS[placement.params_tier].alignment
        layout = FlatLayout.build([item.spec for item in members], ranks, alignment)
        itemsize, is_float = layout.dtype.itemsize, layout.dtype.is_floating_point
        # A unit needs master weights if it is trainable, or in the optimizer's groups.
        stepped = parameters[0].requires_grad or not self._rules.keys().isdisjoint(parameters)
        grads_start = max(last for _, last in spans)
        outside = placement.params and self._outside.issuperset(parameters)
        experts, stacked = self._experts_of(module, members)
        spec = UnitSpec(
            f"experts of {name}" if expert_ranks(parameters[0]) else name,
            layout.numel,
            itemsize,
            ranks,
            placement,
            gathered=self._span(module) if module is not None else (min(spans)[0], grads_start),
            grads_start=grads_start,
            grads_end=min(spans) if is_float and self._optimizer is not None and stepped else None,
            replicas=self._replicas,
            is_float=is_float,
            rereads=not all(looks_up(owner) for item in members for owner in item.owners),
            shared_bytes=sum(item.spec.numel for item in members if len(item.owners) > 1) * itemsize,
            largest_bytes=max(item.spec.numel for item in members) * itemsize,
            persistent=persistent,
            first_parameter=-1 if persistent or outside else min(numbers),
            rule=self._rules.get(parameters[0], ""),
            experts=experts,
            stacked=stacked,
        )
        return UnitPlan(spec, layout, tuple(members), module)

    def _experts_of(
        self, module: nn.Module | None, members: Sequence[OwnedParameter]
    ) -> tuple[int, frozenset[str]]:
        """Return the number of experts that a unit of ``module`` gathers one by one, and the names of their
        weights. These are the module's own, as those of a module inside may have as many rows by chance."""
        found = (
            stacked_experts(module) if module is not None and self._config.units.experts != "all" else None
        )
        if found is None:
            return 0, frozenset()
        own = [item.spec for item in members if module in item.owners]
        stacked = frozenset(spec.name for spec in own if is_stacked(spec, found.experts))
        return (found.experts if stacked else 0), stacked

    def _span(self, module: nn.Module) -> tuple[int, int]:
        """Return first and last parameter of a module."""
        numbers = [number for inner in module.modules() for number in self._numbers.get(inner, ())]
        return min(numbers), max(numbers)


def largest_within_ratio(sizes: Sequence[int], ratio: float) -> frozenset[int]:
    """Return indices of ``sizes`` with a sum of at most ``ratio`` of the whole: from the largest down, each
    that fits, of equal ones the earlier. The same on every rank that asks the same.
    """
    budget = ratio * sum(sizes)
    chosen = []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        if sizes[index] <= budget:
            chosen.append(index)
            budget -= sizes[index]
    return frozenset(chosen)
