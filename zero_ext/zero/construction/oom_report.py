"""Where the state of a model will lie and what it will take there, told when there is no room for it."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_ext.comm import Collectives
from zero_ext.config import Tier, ZeroConfig
from zero_ext.config.library_memory import communicator_bytes
from zero_ext.offload import MemoryHome, StateField
from zero_ext.optim import moments_dtype_named, state_kinds
from zero_ext.optim.elementwise_check import exchanges_signs, fusible
from zero_ext.zero.construction.build_units import layout_of
from zero_ext.zero.construction.grouping import (
    DTYPES,
    Owned,
    UnitPlan,
    plan_units,
    split_optimizer,
    trained_by,
    uses_up_gradients,
)
from zero_ext.zero.construction.model_staging import plan_staging
from zero_ext.zero.units.collective_errors import FailedTogether, together
from zero_ext.zero.units.presharded import born_shard

# What to move off the device, the cheapest first: the optimizer's state is used once a step.
_MOVES = (("optimizer",), ("optimizer", "grads"), ("optimizer", "grads", "params"))
_PLACES: tuple[Tier, ...] = ("host", "nvme")
Held = Mapping[Tier, Mapping[str, int]]


class Forecast:
    """The units that ``model``, whose parameters are ``owned``, will be made of under ``config`` (its batch
    resolved), and the bytes of their state on one rank of ``collectives``, which trains on ``device``.

    ``trains`` says which units need master weights, ``kinds`` what the optimizer keeps beside these, None
    without one; ``staging`` is what passes through.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        owned: Sequence[Owned],
        config: ZeroConfig,
        collectives: Collectives,
        device: torch.device,
    ) -> None:
        self._subject = model, optimizer, owned
        self.config = config
        self.collectives = collectives
        self.device = device
        self.trains = trained_by(optimizer)
        self._fused = optimizer is not None and fusible(optimizer)
        self._parts_masters = exchanges_signs(optimizer)
        self.kinds: Mapping[str, StateField] | None = None
        if optimizer is not None:
            self.kinds = state_kinds(optimizer, moments_dtype_named(config.precision.moments_dtype))
        world_size = collectives.shards.world_size
        replicas = collectives.world_size // world_size
        plans = plan_units(model, owned, config, world_size)
        self.plans = split_optimizer(plans, config, self.trains)
        self.staging = plan_staging(model, optimizer, self.plans, owned, config, replicas, device)

    def held(self) -> Held:
        """Bytes by tier and kind, as ``ledger_by_tier`` reports them after a step."""
        held: dict[Tier, Counter[str]] = {"device": Counter(), "host": Counter(), "nvme": Counter()}
        dtypes = (item.spec.dtype for plan in self.plans for item in plan.members)
        used_up = uses_up_gradients(self.config, dtypes)
        for plan in self.plans:
            self._add(held, plan, used_up)
        held["device"]["staging"] += self.staging.device
        held["host"]["staging"] += self.staging.host + self.collectives.staging_bytes
        held["device"]["autograd's gradients"] += self.staging.autograd
        held["device"]["NCCL's buffers (estimate)"] += self._communicator_bytes()
        return held

    def _communicator_bytes(self) -> int:
        """What the communicators have not allocated yet, which are open."""
        if self.device.type != "cuda":
            return 0
        groups = [each for each in (self.collectives, self.collectives.model) if each is not None]
        return sum(
            communicator_bytes(each.world_size, each.nodes.ranks_per_node, opened=True)
            for each in groups
            if each.in_one_order
        )

    def _add(self, held: Mapping[Tier, Counter[str]], plan: UnitPlan, used_up: bool) -> None:
        layout, placement = layout_of(plan), plan.placement
        dtype, holders = layout.dtype, self.collectives.holders(plan.expert).shards

        def place(sharded: bool, tier: Tier) -> tuple[Tier, int]:
            return (tier, layout.shard_numel) if sharded else ("device", layout.numel)

        params_tier, numel = place(placement.params, placement.params_tier)
        held[params_tier]["params"] += numel * dtype.itemsize
        if placement.params:
            held["device"]["params"] += self.config.communication.secondary_bytes(
                numel,
                dtype.itemsize,
                holders.nodes.nodes,
                dtype.is_floating_point,
            )
        if self.kinds is None or not self.trains(plan) or not dtype.is_floating_point:
            return
        grads_tier, numel = place(placement.grads, placement.grads_tier)
        accumulates = self.config.batch.gradient_accumulation_steps > 1
        width = (DTYPES[self.config.precision.grad_accum_dtype] if accumulates else dtype).itemsize
        if not (used_up and placement.grads and grads_tier == "device"):
            held[grads_tier]["grads"] += numel * width
        tier, numel = place(placement.optimizer, placement.optimizer_tier)
        apart = self.config.offload.step == "delayed" or self._parts_masters
        shared = dtype is torch.float32 and params_tier == tier and not apart
        held[tier]["optimizer"] += 0 if shared else numel * 4
        if not self._fused and tier != "nvme":  # torch's own code has tensors of its own, without padding
            begin, end = layout.shard_range(holders.rank) if placement.optimizer else (0, layout.numel)
            numel = sum(overlap.numel for overlap in layout.overlaps(begin, end))
        held[tier]["optimizer"] += sum(
            field.entries(numel) * field.dtype.itemsize for field in self.kinds.values()
        )

    def told(self, room: int) -> str:
        """What is planned for the device, which had ``room`` bytes left, and what would fit."""
        planned = self.held()["device"]
        return (
            f"planned were {_size(sum(planned.values()))} on {self.device}: {_listed(planned)}; "
            f"{_size(room)} were free, and activations come on top. {self._advice(room)}"
        )

    def _advice(self, room: int) -> str:
        available = _available_bytes()
        for keys, forecast in self._alternatives():
            held = forecast.held()
            on_device, on_host, stored = (sum(held[tier].values()) for tier in ("device", "host", "nvme"))
            if on_device <= room and on_host <= available:
                rest = [f"{_size(on_host)} of host memory"] + [f"{_size(stored)} of NVMe"] * bool(stored)
                return f"With {', '.join(keys)} it is {_size(on_device)} there, {' and '.join(rest)}"
        return "No placement fits: take more ranks, or smaller blocks ('units.tiles')"

    def _alternatives(self) -> Iterator[tuple[list[str], Forecast]]:
        """Other placements, the cheapest first, with the keys to set for them."""
        moves: list[tuple[Tier, Sequence[str]]] = [("host", ()), *itertools.product(_PLACES, _MOVES)]
        for stage, (tier, kinds) in itertools.product(sorted({self.config.stage, 3}), moves):
            moved = [kind for kind in kinds if getattr(self.config.offload, kind) == "device"]
            keys = [f"'stage' {stage}"] * (stage != self.config.stage)
            keys += [f"'offload.{kind}' '{tier}'" for kind in moved]
            forecast = self._under(stage, tier, moved) if keys else None
            if forecast is not None:
                yield keys, forecast

    def _under(self, stage: int, tier: Tier, kinds: Sequence[str]) -> Forecast | None:
        """The forecast with ``kinds`` in ``tier``; None if no configuration says so."""
        changes: dict[str, Any] = dict.fromkeys(kinds, tier)
        if tier == "nvme":
            changes["nvme_paths"] = self.config.offload.nvme_paths or ("/",)
        try:
            config = self.config.replace(stage=stage, offload=self.config.offload.replace(**changes))
        except ValueError:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Forecast(*self._subject, config, self.collectives, self.device)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around the allocation of all state; a collective. ``torch.OutOfMemoryError`` says what was planned,
        on all ranks and before anything is sharded if any rank has not that much. The CPU's memory is not
        watched."""
        if self.device.type == "cpu":
            yield
            return
        room = _room_on(self.device) + self._replaced_bytes()
        try:
            together(self.collectives, lambda: self._check(room), "placing the model", "Nothing was sharded.")
        except FailedTogether as error:
            raise torch.OutOfMemoryError(str(error)) from error
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"prepare ran out of memory: {self.told(room)}. The model is sharded in part: build it "
                f"again. ({error})"
            ) from error

    def _check(self, room: int) -> None:
        if sum(self.held()["device"].values()) > room:
            raise torch.OutOfMemoryError(self.told(room))

    def _replaced_bytes(self) -> int:
        """What the parameters take of the device now, and leave to their units."""
        members = [item.parameter for plan in self.plans for item in plan.members]
        shards = {id(born.home): born.home for each in members if (born := born_shard(each)) is not None}
        shard_bytes = sum(
            home.numel * home.dtype.itemsize
            for home in shards.values()
            if isinstance(home, MemoryHome) and home.tier == "device"
        )
        whole = (each for each in members if each.device == self.device and born_shard(each) is None)
        return shard_bytes + sum(each.untyped_storage().nbytes() for each in whole)


def _room_on(device: torch.device) -> int:
    """Bytes that this process can still allocate there, those that the allocator keeps for it included."""
    free, total = torch.accelerator.get_memory_info(device)
    allocated = torch.accelerator.memory_allocated(device)
    return min(free + torch.accelerator.memory_reserved(device), total) - allocated


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {_size(nbytes)}" for kind, nbytes in counts.items() if nbytes)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
