"""How much memory a step passes through: the one formula that set-up allocates by and plans are made with.

Layouts, placements and the configuration decide, values never.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zero_ext.config import Tier, ZeroConfig
from zero_ext.config.buffer_sizes import (
    BYTES_OF_DTYPE,
    SLOTS,
    STORAGE_ALIGNMENT,
    StepRooms,
    chunk_rooms_bytes,
    extent_bytes,
    part_elements,
    stream_chunk_elements,
)
from zero_ext.config.library_memory import UnitGradientBytes, autograd_gradient_bytes
from zero_ext.config.overlap_limits import HOMES_UNDER_WAY
from zero_ext.config.state_placement import Placement
from zero_ext.zero.memory.pool_plan import Demand, PoolPlan, plan_pool
from zero_ext.zero.memory.pool_replay import StagedUnit, demands_of_a_step

_NEIGHBOURS = 8
_GRAIN = 2 * SLOTS * STORAGE_ALIGNMENT
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
        autograd: device memory for gradients that are not in their unit's buffer yet. Autograd allocates it,
            so it is no part of ``device``.
    """

    pool: PoolPlan
    demands: tuple[Demand, ...]
    rooms: Mapping[Tier, StepRooms]
    ring: int
    landings: int = 0
    transit: int = 0
    autograd: int = 0

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


@dataclass(frozen=True)
class StateStep:
    """What a step of the optimizer means to staging.

    Attributes:
        fused: one op runs it where state is in memory, else torch's own code does.
        streams: the op also runs it where state is on NVMe.
        sizes: bytes of an element of master weights, and of each kind of state beside them.
    """

    fused: bool
    streams: bool
    sizes: tuple[int, ...]


def staging_of(
    units: Sequence[StagedUnit],
    config: ZeroConfig,
    step: StateStep | None,
    *,
    used_up: bool = False,
    accelerated: bool = False,
) -> Staging:
    """The staging of one rank whose parameters form ``units``; ``config.batch`` is resolved.

    ``step`` is None for inference. ``used_up``: each unit's gradient ends with its update in backward;
    ``accelerated``: the device is not the processor.

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
    demands = tuple(demands_of_a_step(units, config, used_up))
    pool = plan_pool(demands)
    transit = _transit_bytes(units, config) if accelerated else 0
    if step is None:
        return Staging(pool, demands, {"device": StepRooms(), "host": StepRooms()}, 0, transit=transit)
    trained = [unit for unit in units if unit.completes is not None]

    def one_pass(unit: StagedUnit) -> bool:
        return step.streams or (step.fused and unit.placement.optimizer_tier != "nvme")

    state = sum(step.sizes)
    chunk = 0 if step.streams else stream_chunk_elements(config.offload.ring_bytes, step.sizes)
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
    landings = _landing_bytes(trained, config) if accelerated else 0
    return Staging(pool, demands, rooms, ring, landings, transit, _autograd_bytes(trained))


def arrive_together(blocks: Sequence[tuple[int, int] | None]) -> list[tuple[int, int]]:
    """The first and last parameter among which each one's gradient may come anywhere: those of its block, or
    up to ``_NEIGHBOURS`` in a row outside blocks: embeddings, a head. ``blocks`` are the first and last
    parameter of each one's block, None outside blocks."""
    found: list[tuple[int, int]] = []
    run = 0
    for number, block in enumerate(blocks):
        if block is not None:
            found.append(block)
            run = 0
            continue
        run = run + 1 if run < _NEIGHBOURS else 1
        found += [(number, number)]
        found[number - run + 1 :] = [(number - run + 1, number)] * run
    return found


def bucket_groups(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Which tensors of ``sizes`` elements, by number, share a bucket: neighbours of at most ``limit``
    together, or a larger one alone."""
    groups: list[list[int]] = []
    filled = 0
    for number, size in enumerate(sizes):
        if not groups or filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(number)
        filled += size
    return groups


def _autograd_bytes(trained: Sequence[StagedUnit]) -> int:
    # Of those that may be complete at the same parameter, a block's own unit has what forward uses first.
    when = {id(unit): unit.completes or (0, 0) for unit in trained}
    backward = sorted(trained, key=lambda unit: (when[id(unit)][0], -when[id(unit)][1]))[::-1]
    return autograd_gradient_bytes(
        UnitGradientBytes(unit.nbytes, unit.largest_bytes, unit.shared_bytes) for unit in backward
    )


def _owned_numel(unit: StagedUnit) -> int:
    return unit.shard_numel if unit.placement.optimizer else unit.numel


def _part_bytes(unit: StagedUnit, config: ZeroConfig, itemsize: int) -> int:
    return extent_bytes(min(_owned_numel(unit), part_elements(config.offload.ring_bytes)) * itemsize)


def _landing_bytes(trained: Sequence[StagedUnit], config: ZeroConfig) -> int:
    if config.batch.gradient_accumulation_steps == 1:
        return 0
    sums = BYTES_OF_DTYPE[config.precision.grad_accum_dtype]
    shards = [
        unit.shard_numel * (unit.itemsize if unit.world_size == 1 else sums)
        for unit in trained
        if unit.placement.grads and unit.placement.grads_tier == "host"
    ]
    return (HOMES_UNDER_WAY + 1) * extent_bytes(max(shards, default=0))


def _transit_bytes(units: Sequence[StagedUnit], config: ZeroConfig) -> int:
    widest = BYTES_OF_DTYPE[config.precision.grad_accum_dtype]
    shards = [0]
    for unit in units:
        placement = unit.placement
        if placement.params and placement.params_tier == "nvme":
            shards.append(unit.shard_numel * unit.itemsize)
        if placement.grads and placement.grads_tier == "nvme":
            shards.append(unit.shard_numel * max(unit.itemsize, widest))
    return min(2 * SLOTS * extent_bytes(max(shards)), config.offload.ring_bytes // _GRAIN * _GRAIN)


def _gradient_room(unit: StagedUnit, config: ZeroConfig, chunk: int, far: bool) -> int:
    """Bytes; ``chunk`` elements are what torch's own code reads of a gradient on NVMe, and ``far`` says that
    the fused step there does not reach the device. Delayed updates work on copies."""
    if config.offload.step == "delayed":
        return 0
    placement = unit.placement
    tier = placement.grads_tier if placement.grads else "device"
    accumulates = config.batch.gradient_accumulation_steps > 1
    summed = BYTES_OF_DTYPE[config.precision.grad_accum_dtype]
    width = summed if accumulates else unit.itemsize
    if far and _is_far(placement):
        # Parts are whole chunks of the state, also of sums that nobody announced.
        return _two_parts_bytes(unit, config, max(width, summed)) if tier == "device" else 0
    if placement.optimizer_tier == "nvme":
        return extent_bytes(min(_owned_numel(unit), chunk) * width) if tier == "nvme" else 0
    return 0 if tier == placement.optimizer_tier else _part_bytes(unit, config, width)


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
        return _two_parts_bytes(unit, config, unit.itemsize) if tier == "device" else 0
    if placement.optimizer_tier in ("nvme", tier) or ((delayed or not fused) and tier != "nvme"):
        return 0
    return _part_bytes(unit, config, unit.itemsize)


def _elementwise_room(unit: StagedUnit, chunk: int, state: int, config: ZeroConfig) -> int:
    """Bytes; in storage an element has ``state`` bytes of master weight and others."""
    placement = unit.placement
    if placement.optimizer_tier != "nvme":
        return _owned_numel(unit) * 4
    stored = placement.params and placement.params_tier == "nvme" and config.offload.step != "delayed"
    return chunk_rooms_bytes(chunk, state, unit.itemsize if stored else 0)
