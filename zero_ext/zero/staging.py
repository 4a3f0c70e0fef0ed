"""How much memory a step passes through: the one formula that set-up allocates by and plans are made with.

Layouts, placements and the configuration decide, values never.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zero_ext.config import Tier, ZeroConfig
from zero_ext.config.pace import HOMES_UNDER_WAY
from zero_ext.config.placement import Placement
from zero_ext.offload import CPU, SLOTS, StepRooms, chunk_rooms_bytes, part_elements, stream_chunk_elements
from zero_ext.offload.extent_arena import PAGE, extent_bytes
from zero_ext.optim import moments_dtype_named, state_kinds
from zero_ext.optim.compatibility import fusible, streamable
from zero_ext.zero.construction import layout_of
from zero_ext.zero.partition import DTYPES, Owned, UnitPlan, find_blocks, trained_by
from zero_ext.zero.pool_plan import Demand, PoolPlan, plan_pool
from zero_ext.zero.pool_replay import StagedUnit, demands_of_a_step
from zero_ext.zero.tiling import Tile

_NEIGHBOURS = 8
_GRAIN = 2 * SLOTS * PAGE
MEMORY: tuple[Tier, Tier] = ("device", "host")


@dataclass(frozen=True)
class Staging:
    """Memory that one rank sets aside for what passes through.

    Attributes:
        pool: device memory for gathered units, unreduced gradients and what their reductions receive.
        demands: what the pool is planned for.
        rooms: memory, by the tier of its state, of an optimizer step whose state lies in another tier than
            gradients or parameters, or that torch's own optimizers run.
        ring: host memory through which optimizer state on NVMe streams.
        landings: host memory in which gradients from an accelerator wait to be added to others.
        transit: host memory through which parameters and gradients pass between NVMe and an accelerator.
    """

    pool: PoolPlan
    demands: tuple[Demand, ...]
    rooms: Mapping[Tier, StepRooms]
    ring: int
    landings: int = 0
    transit: int = 0

    @property
    def device(self) -> int:
        """Bytes of device memory."""
        return self.pool.nbytes + sum(self.rooms["device"])

    @property
    def host(self) -> int:
        """Bytes of host memory. They do not grow with the largest tensor, but for torch's own optimizers on
        state there."""
        return sum(self.rooms["host"]) + self.ring + self.landings + self.transit

    @property
    def total(self) -> int:
        """All bytes."""
        return self.device + self.host


def plan_staging(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    plans: Sequence[UnitPlan],
    owned: Sequence[Owned],
    config: ZeroConfig,
    world_size: int,
    device: torch.device = CPU.device,
) -> Staging:
    """The staging of one rank of ``model``, whose parameters ``owned`` form the units ``plans``.

    ``optimizer`` is None for inference; ``config.batch`` is resolved.

    - pool: the busiest moment of a forward and backward pass, laid out in exact extents; see
      :func:`demands_of_a_step` and :func:`plan_pool`;
    - gradients, outputs: the largest shard, at most ``ring_bytes / 8`` elements, in the precision of
      gradients or parameters, where the step in memory finds them in another tier;
    - elementwise: the largest shard's gradient in fp32 where the optimizer's own code steps state in memory;
      where it steps state on NVMe, three chunks (an eighth of the ring each, at most) and the gradient and
      parameters of one;
    - ring: ``ring_bytes`` where optimizer state is on NVMe;
    - landings: for as many of the largest shards as reductions may be under way to the host, where gradients
      from an accelerator add up there;
    - transit: twelve of the largest shard that passes, at most ``ring_bytes``.
    """
    units = _staged_units(model, optimizer, plans, owned, config, world_size)
    accelerated = device.type != "cpu"
    demands = tuple(demands_of_a_step(units, config))
    pool = plan_pool(demands)
    transit = _transit_bytes(units, config) if accelerated else 0
    if optimizer is None:
        return Staging(pool, demands, {"device": StepRooms(), "host": StepRooms()}, 0, transit=transit)
    trained = [unit for unit in units if unit.completes is not None]

    def one_pass(unit: StagedUnit) -> bool:
        return streamable(optimizer) or (fusible(optimizer) and unit.placement.optimizer_tier != "nvme")

    state, chunk = 0, 0
    if not streamable(optimizer):
        kinds = state_kinds(optimizer, moments_dtype_named(config.precision.moments_dtype))
        sizes = [4, *(field.dtype.itemsize for field in kinds.values())]
        state = sum(sizes)
        chunk = stream_chunk_elements(config.offload.ring_bytes, sizes)
    rooms: dict[Tier, StepRooms] = {}
    for tier in MEMORY:
        near = [unit for unit in trained if (unit.placement.optimizer_tier == "device") == (tier == "device")]
        own_code = [unit for unit in near if not one_pass(unit)]
        rooms[tier] = StepRooms(
            max(
                (_gradient_room(unit, config, chunk, one_pass(unit) and accelerated) for unit in near),
                default=0,
            ),
            max((_output_room(unit, config, one_pass(unit), accelerated) for unit in near), default=0),
            max((_elementwise_room(unit, chunk, state, config) for unit in own_code), default=0),
        )
    ring = config.offload.ring_bytes if config.offload.optimizer == "nvme" else 0
    return Staging(pool, demands, rooms, ring, _landing_bytes(trained, config) if accelerated else 0, transit)


def _staged_units(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    plans: Sequence[UnitPlan],
    owned: Sequence[Owned],
    config: ZeroConfig,
    world_size: int,
) -> list[StagedUnit]:
    inside: dict[nn.Module, list[int]] = {}
    for number, item in enumerate(owned):
        for owner in item.owners:
            inside.setdefault(owner, []).append(number)

    def span(module: nn.Module) -> tuple[int, int]:
        held = [number for part in module.modules() for number in inside.get(part, ())]
        return min(held), max(held)

    blocks = [block for block in find_blocks(model, config).values() if any(True for _ in block.parameters())]
    together = _arrive_together(
        owned, {part: span(block) for block in reversed(blocks) for part in block.modules()}
    )
    trains, found = trained_by(optimizer), []
    for plan in plans:
        own = [together[item.parameter] for item in plan.members]
        layout = layout_of(plan, world_size)
        comes = max(last for _, last in own)
        gathered = span(plan.home) if plan.home is not None else (min(own)[0], comes)
        completes = min(own) if trains(plan) and layout.dtype.is_floating_point else None
        found.append(StagedUnit(plan.name, layout, plan.placement, gathered, comes, completes))
    return found


def _arrive_together(
    owned: Sequence[Owned], block_of: Mapping[nn.Module, tuple[int, int]]
) -> dict[nn.Parameter, tuple[int, int]]:
    """The first and last parameter among which a parameter's gradient may come anywhere: those of its block,
    or up to ``_NEIGHBOURS`` in a row outside blocks: embeddings, a head. Tiles come one after another."""
    found: dict[nn.Parameter, tuple[int, int]] = {}
    run: list[nn.Parameter] = []
    for number, item in enumerate(owned):
        block = block_of.get(item.owners[0]) if len(item.owners) == 1 else None
        if all(isinstance(owner, Tile) for owner in item.owners):
            block = number, number
        if block is not None:
            found[item.parameter] = block
            run = []
            continue
        run = [*run, item.parameter] if len(run) < _NEIGHBOURS else [item.parameter]
        found.update(dict.fromkeys(run, (number - len(run) + 1, number)))
    return found


def _owned_numel(unit: StagedUnit) -> int:
    return unit.layout.shard_numel if unit.placement.optimizer else unit.layout.numel


def _part_bytes(unit: StagedUnit, config: ZeroConfig, itemsize: int) -> int:
    return extent_bytes(min(_owned_numel(unit), part_elements(config.offload.ring_bytes)) * itemsize)


def _landing_bytes(trained: Sequence[StagedUnit], config: ZeroConfig) -> int:
    if config.batch.gradient_accumulation_steps == 1:
        return 0
    sums = DTYPES[config.precision.grad_accum_dtype].itemsize
    shards = [
        unit.layout.shard_numel * (unit.layout.dtype.itemsize if unit.layout.world_size == 1 else sums)
        for unit in trained
        if unit.placement.grads and unit.placement.grads_tier == "host"
    ]
    return (HOMES_UNDER_WAY + 1) * extent_bytes(max(shards, default=0))


def _transit_bytes(units: Sequence[StagedUnit], config: ZeroConfig) -> int:
    widest = DTYPES[config.precision.grad_accum_dtype].itemsize
    shards = [0]
    for unit in units:
        placement, layout = unit.placement, unit.layout
        if placement.params and placement.params_tier == "nvme":
            shards.append(layout.shard_numel * layout.dtype.itemsize)
        if placement.grads and placement.grads_tier == "nvme":
            shards.append(layout.shard_numel * max(layout.dtype.itemsize, widest))
    return min(2 * SLOTS * extent_bytes(max(shards)), config.offload.ring_bytes // _GRAIN * _GRAIN)


def _gradient_room(unit: StagedUnit, config: ZeroConfig, chunk: int, far: bool) -> int:
    """Bytes; ``chunk`` elements are what torch's own code reads of a gradient on NVMe, and ``far`` says that
    the fused step there does not reach the device. Delayed updates work on copies."""
    if config.offload.step == "delayed":
        return 0
    placement = unit.placement
    tier = placement.grads_tier if placement.grads else "device"
    accumulates = config.batch.gradient_accumulation_steps > 1
    dtype = DTYPES[config.precision.grad_accum_dtype] if accumulates else unit.layout.dtype
    if far and _is_far(placement):
        # Parts are whole chunks of the state, also of sums that nobody announced.
        widest = max(dtype.itemsize, DTYPES[config.precision.grad_accum_dtype].itemsize)
        return _two_parts_bytes(unit, config, widest) if tier == "device" else 0
    if placement.optimizer_tier == "nvme":
        return extent_bytes(min(_owned_numel(unit), chunk) * dtype.itemsize) if tier == "nvme" else 0
    return 0 if tier == placement.optimizer_tier else _part_bytes(unit, config, dtype.itemsize)


def _is_far(placement: Placement) -> bool:
    """Whether state is on NVMe, and gradients or parameters on the device."""
    tiers = {
        placement.grads_tier if placement.grads else "device",
        placement.params_tier if placement.params else "device",
    }
    return placement.optimizer_tier == "nvme" and "device" in tiers


def _two_parts_bytes(unit: StagedUnit, config: ZeroConfig, itemsize: int) -> int:
    return 2 * extent_bytes(min(_owned_numel(unit), part_elements(config.offload.ring_bytes) // 2) * itemsize)


def _output_room(unit: StagedUnit, config: ZeroConfig, fused: bool, accelerated: bool) -> int:
    placement = unit.placement
    tier = placement.params_tier if placement.params else "device"
    delayed = config.offload.step == "delayed"  # then parameters follow the masters after the step
    if accelerated and fused and not delayed and _is_far(placement):
        return _two_parts_bytes(unit, config, unit.layout.dtype.itemsize) if tier == "device" else 0
    if placement.optimizer_tier in ("nvme", tier) or ((delayed or not fused) and tier != "nvme"):
        return 0
    return _part_bytes(unit, config, unit.layout.dtype.itemsize)


def _elementwise_room(unit: StagedUnit, chunk: int, state: int, config: ZeroConfig) -> int:
    """Bytes; in storage an element has ``state`` bytes of master weight and others."""
    placement = unit.placement
    if placement.optimizer_tier != "nvme":
        return _owned_numel(unit) * 4
    stored = placement.params and placement.params_tier == "nvme" and config.offload.step != "delayed"
    return chunk_rooms_bytes(chunk, state, unit.layout.dtype.itemsize if stored else 0)
