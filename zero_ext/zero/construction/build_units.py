"""Turns a model's parameters into units, one unit at a time, so that memory never holds the model twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from zero_ext.comm import Collectives
from zero_ext.config import CommunicationPolicy
from zero_ext.offload import STORAGE_ALIGNMENT, Tiers
from zero_ext.zero.construction.grouping import Owned, UnitPlan
from zero_ext.zero.memory.pool import BufferPool
from zero_ext.zero.memory.trim_heap import trim_heap
from zero_ext.zero.units.deferred_errors import Postponed
from zero_ext.zero.units.dtensor_local import local_part
from zero_ext.zero.units.flat_layout import ALIGNMENT_BYTES, FlatLayout, in_memory_order
from zero_ext.zero.units.master_weights import MasterShard
from zero_ext.zero.units.presharded import PIECE_BYTES, REBUILD, born_shard, forget_birth
from zero_ext.zero.units.quantized_params import packed_tensors
from zero_ext.zero.units.unit import Unit


def in_birth_order(owned: Sequence[Owned]) -> list[Owned]:
    """``owned`` with the memory order that parameters from :class:`zero_ext.Init` had while whole."""
    found = []
    for item in owned:
        born = born_shard(item.parameter)
        if born is not None:
            item = replace(item, spec=replace(item.spec, stride=born.spec.stride))
        found.append(item)
    return found


def check_values(owned: Sequence[Owned]) -> None:
    """Raises before anything changes if a parameter has no value that could be sharded.

    ``ValueError`` for one on the meta device, ``RuntimeError`` for one from :class:`zero_ext.Init` that was
    written to since.
    """
    for item in owned:
        parameter = item.parameter
        born = born_shard(parameter)
        if born is not None and born.replaced_in(parameter):
            raise RuntimeError(
                f"parameter '{item.spec.name}' was written to between zero_ext.Init and zero_ext.prepare, "
                "while only shards of it exist; the value would be lost. Write inside 'with "
                "zero_ext.Init(...)', or after prepare inside 'with zero_ext.gathered(params, "
                "modifier_rank=0)'."
            )
        if parameter.is_meta:
            raise ValueError(
                f"parameter '{item.spec.name}' is on device 'meta', which has no values; build the model "
                "inside 'with zero_ext.Init(config):', or pass values='empty' and load a checkpoint"
            )


def device_of(owned: Sequence[Owned], wanted: torch.device | str | None = None) -> torch.device:
    """The device that a model trains on: the one ``wanted``, its parameters', or where none has a value of
    its own yet (meta, :class:`zero_ext.Init`) the accelerator, or the CPU without one. ``ValueError`` for
    several devices."""
    if wanted is not None:
        return torch.empty(0, device=wanted).device  # with its index
    found: dict[torch.device, str] = {}
    for item in owned:
        if not item.parameter.is_meta and born_shard(item.parameter) is None:
            found.setdefault(item.parameter.device, item.spec.name)
    if len(found) > 1:
        seen = ", ".join(f"'{name}' on '{device}'" for device, name in found.items())
        raise ValueError(
            f"the parameters are on {len(found)} devices: {seen}; one is wanted. Move the model to one "
            "device first (model.to(device)), or pass device=...; ranks share it out, one device each."
        )
    return next(iter(found)) if found else accelerator_or_cpu()


def accelerator_or_cpu() -> torch.device:
    """This process's current accelerator device; the CPU where there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def layout_of(plan: UnitPlan) -> FlatLayout:
    """How the unit of ``plan`` will lie in its flat buffer."""
    stored = plan.placement.params and plan.placement.params_tier == "nvme"
    alignment = STORAGE_ALIGNMENT if stored else ALIGNMENT_BYTES
    return FlatLayout.build([item.spec for item in plan.members], plan.ranks, alignment)


def reserve_storage(
    plans: Sequence[UnitPlan],
    tiers: Tiers,
    trains: Callable[[UnitPlan], bool],
    sums: torch.dtype,
) -> None:
    """Makes room in storage for all that the units will keep there, before anything changes; gradients may
    add up in ``sums``."""
    total = 0
    for plan in plans:
        layout, placement = layout_of(plan), plan.placement
        if placement.params:
            total += tiers.stored_bytes(placement.params_tier, layout.shard_numel, layout.dtype)
        if trains(plan) and layout.dtype.is_floating_point:
            owned = layout.shard_numel if placement.optimizer else layout.numel
            total += tiers.stored_state_bytes(placement.optimizer_tier, owned)
            widest = max(layout.dtype, sums, key=lambda each: each.itemsize)
            if placement.grads:
                total += tiers.stored_bytes(placement.grads_tier, layout.shard_numel, widest)
    tiers.reserve(total)


def build_unit(
    plan: UnitPlan,
    collectives: Collectives,
    pool: BufferPool,
    tiers: Tiers,
    policy: CommunicationPolicy,
    load_values: bool,
    trains: bool,
) -> tuple[Unit, MasterShard | None]:
    """Makes one unit from the parameters' present values, which are freed, and its master weights.

    The values count that rank 0 has, of an expert those of the first rank that has it. ``load_values`` False
    leaves everything zero (a checkpoint follows); ``trains`` False makes no master weights. Raises
    ``RuntimeError`` on all ranks if storage fails on any.
    """
    members = plan.members
    holders = collectives.holders(plan.expert)
    layout = layout_of(plan)
    unit = Unit(
        plan.name,
        [item.parameter for item in members],
        layout,
        plan.placement,
        holders.shards,
        pool,
        tiers,
        policy,
        plan.persistent,
    )
    master = MasterShard(unit, tiers) if trains and layout.dtype.is_floating_point else None
    with torch.no_grad():
        if load_values:
            _fill(unit, master, members, holders)
        else:
            unit.publish_views()
        for item in members:
            forget_birth(item.parameter)
    if plan.placement.params:
        unit.to_released()
    trim_heap()
    return unit, master


def _fill(unit: Unit, master: MasterShard | None, members: Sequence[Owned], collectives: Collectives) -> None:
    """Streams the parameters' values into a unit and its master weights, a piece at a time."""
    failures = Postponed()
    for index, item in enumerate(members):
        for start, values in _pieces(item, collectives, failures):
            unit.put(index, start, values)
            if master is not None:
                failures.attempt(partial(master.put, index, start, values))
    failures.attempt(unit.publish)
    failures.settle(collectives, f"filling {unit.describe()}", REBUILD)


def _pieces(item: Owned, collectives: Collectives, failures: Postponed) -> Iterator[tuple[int, torch.Tensor]]:
    """Rank 0's values of a parameter in memory order, in pieces, each with its first element's number. They
    go to everyone unless the same ranks have shared them before."""
    parameter = item.parameter
    born = born_shard(parameter)
    if born is not None and born.ranks in (None, collectives.ranks):
        yield from born.pieces(collectives, failures)
        return
    value = local_part(parameter).data if born is None else born.whole()
    flattened = in_memory_order(value, item.spec)
    if flattened.numel():
        collectives.broadcast_(flattened, 0, f"first value of parameter '{item.spec.name}' from rank 0")
    step = PIECE_BYTES // flattened.element_size()
    for start in range(0, flattened.numel(), step):
        yield start, flattened[start : start + step]


def broadcast_buffers(model: nn.Module, collectives: Collectives) -> None:
    """Gives every rank rank 0's module buffers, and what makes sense of its quantised parameters."""
    for name, buffer in (*model.named_buffers(), *packed_tensors(model).items()):
        if buffer.numel() and not buffer.is_meta:
            value = buffer.data.contiguous()
            collectives.broadcast_(value.view(-1).view(torch.uint8), 0, f"buffer '{name}' from rank 0")
            if value.data_ptr() != buffer.data_ptr():
                buffer.data.copy_(value)
