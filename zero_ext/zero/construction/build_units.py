"""Construction of units from a model's parameters, one by one, so that the model is never in memory twice."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from zero_ext.comm import Collectives
from zero_ext.config import CommunicationConfig
from zero_ext.offload import TierManager
from zero_ext.zero.construction.grouping import OwnedParameter, UnitPlan
from zero_ext.zero.memory.pool import BufferPool
from zero_ext.zero.units.collective_errors import DeferredError
from zero_ext.zero.units.dtensor_local import local_tensor
from zero_ext.zero.units.flat_layout import in_memory_order
from zero_ext.zero.units.master_weights import MasterShard
from zero_ext.zero.units.presharded import INIT_CHUNK_BYTES, REBUILD, clear_presharded, presharded_of
from zero_ext.zero.units.unit import Unit


def check_values(owned: Sequence[OwnedParameter]) -> None:
    """Raise before anything changes if a parameter has no value that could be sharded.

    ``ValueError`` for one on the meta device, ``RuntimeError`` for one from :class:`zero_ext.Init` that was
    written to since.
    """
    for item in owned:
        parameter = item.parameter
        presharded = presharded_of(parameter)
        if presharded is not None and presharded.was_replaced(parameter):
            raise RuntimeError(
                f"parameter '{item.spec.name}': it was written to between zero_ext.Init and "
                "zero_ext.prepare, while only shards of it exist, and the value would be lost. Write inside "
                "'with zero_ext.Init(...)', or after prepare inside 'with zero_ext.gathered(params, "
                "modifier_rank=0)'."
            )
        if parameter.is_meta:
            raise ValueError(
                f"parameter '{item.spec.name}': expected values, got device 'meta'. Build the model inside "
                "'with zero_ext.Init(config):', or pass init='skip' and load a checkpoint."
            )


def device_of(owned: Sequence[OwnedParameter], wanted: torch.device | str | None = None) -> torch.device:
    """Return the device that a model trains on.

    It is the one ``wanted``, that of its parameters, or if none has a value of its own yet (meta,
    :class:`zero_ext.Init`) the accelerator, or the CPU without one. ``ValueError`` for several devices.
    """
    if wanted is not None:
        return torch.empty(0, device=wanted).device  # with its index
    found: dict[torch.device, str] = {}
    for item in owned:
        if not item.parameter.is_meta and presharded_of(item.parameter) is None:
            found.setdefault(item.parameter.device, item.spec.name)
    if len(found) > 1:
        seen = ", ".join(f"'{name}' on '{device}'" for device, name in found.items())
        raise ValueError(
            f"parameters: expected one device, got {seen}. Move the model to one device first "
            "(model.to(device)), or pass device=.... Ranks shard the model, one device each."
        )
    return next(iter(found)) if found else accelerator_or_cpu()


def accelerator_or_cpu() -> torch.device:
    """Return this process's current accelerator device, or the CPU without one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def reserve_storage(plans: Sequence[UnitPlan], tiers: TierManager, sums: torch.dtype) -> None:
    """Reserve the NVMe space of all units, before anything changes. Gradients may add up in ``sums``."""
    total = 0
    for plan in plans:
        layout, placement = plan.layout, plan.spec.placement
        total += tiers.stored_bytes(placement.params_tier, layout.shard_numel, layout.dtype)
        if plan.spec.trained:
            total += tiers.stored_state_bytes(placement.optimizer_tier, plan.spec.owned_numel, plan.spec.rule)
            widest = max(layout.dtype, sums, key=lambda each: each.itemsize)
            total += tiers.stored_bytes(placement.grads_tier, layout.shard_numel, widest)
    tiers.reserve(total)


def build_unit(
    plan: UnitPlan,
    collectives: Collectives,
    pool: BufferPool,
    tiers: TierManager,
    communication: CommunicationConfig,
    load_values: bool,
) -> tuple[Unit, MasterShard | None]:
    """Make one unit from the parameters' present values, which are freed, and its master weights.

    The values count that rank 0 has, of an expert those of the first rank that has it. ``load_values`` False
    leaves everything zero (a checkpoint follows). Raises ``RuntimeError`` on all ranks if storage fails on
    any.
    """
    members = plan.members
    holders = collectives.holders(plan.expert)
    parameters = [item.parameter for item in members]
    unit = Unit(plan.spec, plan.layout, parameters, holders.shards, pool, tiers, communication)
    master = MasterShard(unit, tiers) if plan.spec.trained else None
    with torch.no_grad():
        if load_values:
            _fill(unit, master, members, holders)
        else:
            unit.publish_views()
        # The shards are dropped only now because the values above were gathered from them.
        for item in members:
            clear_presharded(item.parameter)
    if plan.spec.placement.params:
        unit.to_released()
    trim_heap()
    return unit, master


def _fill(
    unit: Unit, master: MasterShard | None, members: Sequence[OwnedParameter], collectives: Collectives
) -> None:
    """Stream the parameters' values into a unit and its master weights, chunk by chunk."""
    failures = DeferredError()
    for index, item in enumerate(members):
        for start, values in _value_chunks(item, collectives, failures):
            unit.put(index, start, values)
            if master is not None:
                # Storage may fail on this rank alone. It then goes on with the exchange, which the
                # others need.
                failures.attempt(partial(master.put, index, start, values))
    failures.attempt(unit.publish)
    failures.raise_deferred(collectives, f"filling {unit.describe()}", REBUILD)


def _value_chunks(
    item: OwnedParameter, collectives: Collectives, failures: DeferredError
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield rank 0's values of a parameter in chunks, each with the number of its first element.

    They are broadcast unless the same ranks have shards of them already.
    """
    parameter = item.parameter
    presharded = presharded_of(parameter)
    if presharded is not None and (presharded.replicas or collectives).ranks == collectives.ranks:
        yield from presharded.chunks(collectives, failures)
        return
    value = local_tensor(parameter).data if presharded is None else presharded.gather()
    flattened = in_memory_order(value, item.spec)
    if flattened.numel():
        collectives.broadcast_(flattened, 0, f"first value of parameter '{item.spec.name}' from rank 0")
    step = INIT_CHUNK_BYTES // flattened.element_size()
    for start in range(0, flattened.numel(), step):
        yield start, flattened[start : start + step]


def trim_heap() -> None:
    """Return the free pages of the C library's heap to the system, if it can (glibc).

    After a few large tensors were freed, glibc puts tensors of up to 32 MiB on its heap, which it returns
    only from the end. Most of a model that is built and freed parameter by parameter would stay.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
