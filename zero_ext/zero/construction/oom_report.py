"""Estimate of a model's memory by tier, and the report when the device has too little."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_ext.comm import Collectives
from zero_ext.config import ZeroConfig
from zero_ext.config.buffer_sizes import communicator_bytes
from zero_ext.config.full_tensor_costs import (
    deal_owners,
    full_tensor_step_bytes,
    newton_schulz_cost,
    wave_elements,
)
from zero_ext.config.tiers import CAPACITIES, TIERS, Tier, is_stored
from zero_ext.offload import MemoryShard, StateField
from zero_ext.optim import Segment, moments_dtype_named, state_kinds
from zero_ext.optim.adafactor import FactoredLayout, is_factored
from zero_ext.optim.full_tensors.muon_groups import direction_dtype
from zero_ext.optim.full_tensors.owner_stepper import owner_cost
from zero_ext.optim.full_tensors.owner_trial import planned_state_bytes
from zero_ext.optim.optimizer_registry import (
    factors_state,
    fusible,
    is_one_bit,
    needs_whole_tensors,
    steps_at_owners,
    steps_full_tensors,
    streamable,
)
from zero_ext.zero.construction.grouping import (
    DTYPES,
    OwnedParameter,
    UnitPlan,
    plan_units,
    uses_up_gradients,
)
from zero_ext.zero.construction.staging_sizes import Staging, StateStep, staging_of
from zero_ext.zero.units.collective_errors import CollectiveError, raise_on_all_ranks
from zero_ext.zero.units.presharded import presharded_of

# What to move off the device, the cheapest first: the optimizer's state is used once a step.
_MOVES = (("optimizer",), ("optimizer", "grads"), ("optimizer", "grads", "params"))
TierBytes = Mapping[Tier, Mapping[str, int]]


class MemoryEstimate:
    """Plan of a model's units under ``config``, and the bytes of their state on one rank.

    ``model`` has the parameters ``owned`` and is trained on ``device``. The batch of ``config`` is resolved.
    ``plans`` are the planned units, ``kinds`` the optimizer's state besides master weights, None without an
    optimizer, and ``staging`` the staging memory of a step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        owned: Sequence[OwnedParameter],
        config: ZeroConfig,
        collectives: Collectives,
        device: torch.device,
    ) -> None:
        self._subject = model, optimizer, owned
        self.config, self.collectives, self.device = config, collectives, device
        self._fused = optimizer is not None and fusible(optimizer)
        self._factors = factors_state(optimizer)
        self._separates_masters = is_one_bit(optimizer)
        world_size = collectives.shards.world_size
        replicas = collectives.world_size // world_size
        self.plans = plan_units(model, owned, optimizer, config, world_size, replicas)
        self.kinds = kinds_by_rule(self.plans, optimizer, config)
        self.staging = plan_staging(self.plans, optimizer, config, device)

    def bytes_by_tier(self) -> TierBytes:
        """Return bytes by tier and kind, as ``Engine.memory_by_tier`` reports them after a step."""
        held: dict[Tier, Counter[str]] = {tier: Counter() for tier in TIERS}
        used_up = uses_up_gradients(self.config, (plan.layout.dtype for plan in self.plans))
        for plan in self.plans:
            self._add(held, plan, used_up)
            if self._factors and plan.spec.trained:
                self._add_statistics(held, plan)
        held["device"]["staging"] += self.staging.device
        held["host"]["staging"] += self.staging.host + self.collectives.staging_bytes
        held["device"]["autograd's gradients"] += self.staging.autograd
        optimizer = self._subject[1]
        if optimizer is not None and steps_at_owners(optimizer):
            self._add_owners_state(held, optimizer)
        elif optimizer is not None and needs_whole_tensors(optimizer):
            self._add_matrices(held, direction_dtype(optimizer.param_groups).itemsize)
        if self.device.type == "cuda":  # what open communicators have not allocated yet
            held["device"]["NCCL's buffers (estimate)"] += sum(
                communicator_bytes(each.world_size, each.nodes.ranks_per_node, opened=True)
                for each in (self.collectives, self.collectives.model, self.collectives.slices)
                if each is not None and each.in_one_order
            )
        return held

    def _add(self, held: Mapping[Tier, Counter[str]], plan: UnitPlan, used_up: bool) -> None:
        layout, placement = plan.layout, plan.spec.placement
        dtype, holders = layout.dtype, self.collectives.holders(plan.expert).shards

        def numel_of(sharded: bool) -> int:
            return layout.shard_numel if sharded else layout.numel

        numel = numel_of(placement.params)
        held[placement.params_tier]["params"] += numel * dtype.itemsize
        if placement.params:
            held["device"]["params"] += self.config.communication.secondary_bytes(
                numel, dtype.itemsize, holders.nodes.nodes, dtype.is_floating_point
            )
        if not self.kinds or not plan.spec.trained:
            return
        accumulates = self.config.batch.gradient_accumulation_steps > 1
        width = (DTYPES[self.config.precision.grad_accum_dtype] if accumulates else dtype).itemsize
        if not (used_up and placement.grads and placement.grads_tier == "device"):
            held[placement.grads_tier]["grads"] += numel_of(placement.grads) * width
        tier, numel = placement.optimizer_tier, numel_of(placement.optimizer)
        separate = self.config.offload.update_mode == "delayed" or self._separates_masters
        shared = dtype is torch.float32 and placement.params_tier == tier and not separate
        held[tier]["optimizer"] += 0 if shared else numel * 4
        if not (self._fused or is_stored(tier)):  # torch's own code has its own tensors, without padding
            numel = sum(segment.numel for segment in self._own_segments(plan))
        held[tier]["optimizer"] += sum(
            field.entries(numel) * field.dtype.itemsize for field in self.kinds[plan.spec.rule].values()
        )

    def _add_statistics(self, held: Mapping[Tier, Counter[str]], plan: UnitPlan) -> None:
        """Add averages of squares: of rows and columns of full matrices, and of this rank's elements of the
        other parameters."""
        elements = sum(
            segment.numel for segment in self._own_segments(plan) if not is_factored(segment.shape)
        )
        for spec in plan.layout.specs:
            if is_factored(spec.shape):
                elements += sum(FactoredLayout(spec.shape, spec.stride).numels())
        held[TIERS[plan.spec.placement.optimizer_tier].near]["optimizer"] += 4 * elements

    def _add_owners_state(self, held: Mapping[Tier, Counter[str]], optimizer: torch.optim.Optimizer) -> None:
        """Add the state of the tensors that this rank owns, by a step of the optimizer on small ones."""
        groups = enumerate(optimizer.param_groups)
        group_of = {each: number for number, group in groups for each in group["params"]}
        dealt: dict[Collectives | None, list[tuple[Tier, OwnedParameter]]] = defaultdict(list)
        for plan in self.plans:
            holders = self.collectives.holders(plan.expert).shards
            shared = plan.spec.placement.optimizer and holders.world_size > 1
            stepped = [each for each in plan.members if each.parameter in group_of and each.spec.numel]
            dealt[holders if shared else None] += [
                (plan.spec.placement.optimizer_tier, each) for each in stepped
            ]
        for ranks, members in dealt.items():
            size, rank = (ranks.world_size, ranks.rank) if ranks is not None else (1, 0)
            owners = deal_owners([owner_cost(each.spec.shape) for _, each in members], size)
            for owner, (tier, each) in zip(owners, members, strict=True):
                if owner == rank:
                    number = group_of[each.parameter]
                    held[tier]["optimizer"] += planned_state_bytes(optimizer, number, each.spec.shape)

    def _own_segments(self, plan: UnitPlan) -> list[Segment]:
        """Return the segments of a unit that this rank has the optimizer state of."""
        layout, rank = plan.layout, self.collectives.holders(plan.expert).shards.rank
        begin, end = layout.shard_range(rank) if plan.spec.placement.optimizer else (0, layout.numel)
        return layout.segments(begin, end)

    def _add_matrices(self, held: Mapping[Tier, Counter[str]], direction_bytes: int) -> None:
        """Add what a step on full matrices works on: those of all units, in backward of one."""
        shards: list[int] = []
        away: list[int] = []  # of these, with state in another tier
        ranks, largest = 1, tuple[int, ...]((0, 0))
        for plan in self.plans:
            spec = plan.spec
            if not spec.trained or not steps_full_tensors(spec.rule):
                continue
            shards.append(spec.owned_numel)
            if spec.placement.optimizer_tier != "device" and self.device.type != "cpu":
                away.append(spec.owned_numel)
            ranks = max(ranks, spec.world_size if spec.placement.optimizer else 1)
            largest = max([largest, *(each.spec.shape for each in plan.members)], key=newton_schulz_cost)
        if self.config.offload.update_mode == "in_backward":
            shards, away = [max(shards, default=0)], [max(away, default=0)]
        held["device"]["matrices of a step"] += full_tensor_step_bytes(
            shards, ranks, largest, direction_bytes
        )
        held["host"]["matrices of a step"] += direction_bytes * wave_elements(away)

    def message(self, free_bytes: int) -> str:
        """Return what is planned for the device, which had ``free_bytes`` left, and what would fit."""
        planned = self.bytes_by_tier()["device"]
        listed = ", ".join(f"{kind} {_size(nbytes)}" for kind, nbytes in planned.items() if nbytes)
        return (
            f"{self.device}: expected {_size(sum(planned.values()))} free for {listed}, and more for "
            f"activations, got {_size(free_bytes)}. {self._advice(free_bytes)}"
        )

    def _advice(self, free_bytes: int) -> str:
        available = _available_bytes()
        for keys, estimate in self._alternatives():
            held: Counter[Tier] = Counter()
            for tier, nbytes in estimate.bytes_by_tier().items():
                held[TIERS[tier].capacity] += sum(nbytes.values())
            on_device, on_host, stored = (held[capacity] for capacity in CAPACITIES)
            if on_device <= free_bytes and on_host <= available:
                rest = [f"{_size(on_host)} of host memory"] + [f"{_size(stored)} of NVMe"] * bool(stored)
                return f"Set {', '.join(keys)} to use {_size(on_device)} there and {' and '.join(rest)}."
        return "Use more ranks, or smaller blocks ('units.tiles'), as no placement fits."

    def _alternatives(self) -> Iterator[tuple[list[str], MemoryEstimate]]:
        """Other placements, the cheapest first, with the keys to set for them."""
        moves: list[tuple[Tier, Sequence[str]]] = [("host", ()), *itertools.product([*TIERS][1:], _MOVES)]
        for stage, (tier, kinds) in itertools.product(sorted({self.config.stage, 3}), moves):
            moved = [kind for kind in kinds if getattr(self.config.offload, kind) == "device"]
            keys = [f"'stage' {stage}"] * (stage != self.config.stage)
            keys += [f"'offload.{kind}' '{tier}'" for kind in moved]
            estimate = self._under(stage, tier, moved) if keys else None
            if estimate is not None:
                yield keys, estimate

    def _under(self, stage: int, tier: Tier, kinds: Sequence[str]) -> MemoryEstimate | None:
        """Return the estimate with ``kinds`` in ``tier``; None if there is no such configuration."""
        changes: dict[str, Any] = dict.fromkeys(kinds, tier)
        if is_stored(tier):
            changes["nvme_paths"] = self.config.offload.nvme_paths or ("/",)
        try:
            config = self.config.replace(stage=stage, offload=self.config.offload.replace(**changes))
        except ValueError:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return MemoryEstimate(*self._subject, config, self.collectives, self.device)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Return a context for the allocation of all state; a collective. The CPU's memory is not checked.

        ``torch.OutOfMemoryError``, with the plan in its message, is raised on all ranks before anything is
        sharded if any has too little memory.
        """
        if self.device.type == "cpu":
            yield
            return
        free_bytes = _free_bytes_on(self.device) + self._replaced_bytes()

        def check() -> None:
            if sum(self.bytes_by_tier()["device"].values()) > free_bytes:
                raise torch.OutOfMemoryError(self.message(free_bytes))

        try:
            raise_on_all_ranks(self.collectives, check, "placing the model", "Nothing was sharded.")
        except CollectiveError as error:
            raise torch.OutOfMemoryError(str(error)) from error
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"prepare: out of memory ({error}). {self.message(free_bytes)} Build the model again: it is "
                "sharded in part."
            ) from error

    def _replaced_bytes(self) -> int:
        """Return the bytes of the device that the parameters use now, and their units will use."""
        members = [item.parameter for plan in self.plans for item in plan.members]
        shards = {found.storage for each in members if (found := presharded_of(each)) is not None}
        shard_bytes = sum(
            shard.numel * shard.dtype.itemsize
            for shard in shards
            if isinstance(shard, MemoryShard) and shard.tier == "device"
        )
        ordinary = (each for each in members if each.device == self.device and presharded_of(each) is None)
        return shard_bytes + sum(each.untyped_storage().nbytes() for each in ordinary)


def kinds_by_rule(
    plans: Sequence[UnitPlan], optimizer: torch.optim.Optimizer | None, config: ZeroConfig
) -> dict[str, Mapping[str, StateField]]:
    """Return the optimizer's state besides the master weights, by the rules of ``plans``; nothing without an
    optimizer."""
    if optimizer is None:
        return {}
    dtype = moments_dtype_named(config.precision.moments_dtype)
    rules = dict.fromkeys(plan.spec.rule for plan in plans if plan.spec.trained)
    return {rule: state_kinds(optimizer, dtype, rule) for rule in rules}


def plan_staging(
    plans: Sequence[UnitPlan],
    optimizer: torch.optim.Optimizer | None,
    config: ZeroConfig,
    device: torch.device,
) -> Staging:
    """Return the staging memory of one rank for a step of ``optimizer``, which is None for inference.

    The batch of ``config`` is resolved.
    """
    step = None
    if optimizer is not None:
        by_rule = kinds_by_rule(plans, optimizer, config).values()
        kinds = {name: field for each in by_rule for name, field in each.items()}
        sizes = (torch.float32.itemsize, *(field.dtype.itemsize for field in kinds.values()))
        step = StateStep(fusible(optimizer), streamable(optimizer), sizes)
    return staging_of(
        [plan.spec for plan in plans],
        config,
        step,
        used_up=uses_up_gradients(config, (plan.layout.dtype for plan in plans)),
        accelerated=device.type != "cpu",
    )


def _free_bytes_on(device: torch.device) -> int:
    """Return the bytes that this process can still allocate, including those that the allocator caches."""
    free, total = torch.accelerator.get_memory_info(device)
    allocated = torch.accelerator.memory_allocated(device)
    return min(free + torch.accelerator.memory_reserved(device), total) - allocated


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
