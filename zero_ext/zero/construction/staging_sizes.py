"""Sizes of the staging memory of a step: one formula for what ``prepare`` allocates and for plans.

They depend on layouts, placements and the configuration, never on values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zero_ext.config import ZeroConfig
from zero_ext.config.buffer_sizes import (
    BYTES_OF_DTYPE,
    SHARD_TRANSFERS_IN_FLIGHT,
    SLOTS,
    STORAGE_ALIGNMENT,
    StagingSizes,
    UnitGradientBytes,
    autograd_gradient_bytes,
    chunk_buffer_bytes,
    extent_bytes,
    staging_chunk_elements,
    stream_chunk_elements,
)
from zero_ext.config.offload import StatePlacement
from zero_ext.config.tiers import TIERS, Tier, is_stored, share_memory
from zero_ext.zero.memory.gathered_unit import UnitSpec
from zero_ext.zero.memory.pool_plan import Demand, PoolPlan, plan_pool
from zero_ext.zero.unshard.pool_replay import demands_of_a_step

_NEIGHBORS = 8
_GRAIN = 2 * SLOTS * STORAGE_ALIGNMENT
MEMORY: tuple[Tier, Tier] = ("device", "host")


@dataclass(frozen=True)
class Staging:
    """Staging memory of one rank."""

    pool: PoolPlan  # device memory: gathered units, unreduced gradients and what their reductions receive
    demands: tuple[Demand, ...]  # what the pool is planned for
    # Of an optimizer step, by the tier of its state, where that is stored in another tier than gradients or
    # parameters, or torch's own optimizers run.
    step_buffers: Mapping[Tier, StagingSizes]
    ring: int  # host memory through which optimizer state on NVMe streams
    gradient_staging: int = 0  # host memory in which gradients from an accelerator wait to be added
    bounce_buffer: int = 0  # host memory of copies between NVMe and an accelerator
    autograd: int = 0  # gradients that are not in their unit's buffer yet, in memory that ``device`` lacks

    @property
    def device(self) -> int:
        """Bytes of device memory."""
        return self.pool.nbytes + sum(self.step_buffers["device"])

    @property
    def host(self) -> int:
        """Bytes of host memory. Only torch's own optimizers make them grow with the largest tensor."""
        return sum(self.step_buffers["host"]) + self.ring + self.gradient_staging + self.bounce_buffer

    @property
    def total(self) -> int:
        """All bytes."""
        return self.device + self.host


@dataclass(frozen=True)
class StateStep:
    """Properties of the optimizer step that staging depends on."""

    fused: bool  # one op runs it where state is in memory, else torch's own code does
    streams: bool  # the op also runs it where state is on NVMe
    sizes: tuple[int, ...]  # bytes of an element of master weights, and of each other kind of state


def staging_of(
    units: Sequence[UnitSpec],
    config: ZeroConfig,
    step: StateStep | None,
    *,
    used_up: bool = False,
    accelerated: bool = False,
) -> Staging:
    """Return the staging of one rank with parameters in ``units``; ``config.batch`` is resolved.

    ``step`` is None for inference. ``used_up``: each unit's gradient ends with its update in backward;
    ``accelerated``: the device is not the processor.

    - pool: the busiest moment of a forward and backward pass, laid out in exact extents; see
      :func:`demands_of_a_step` and :func:`plan_pool`;
    - gradients, outputs: the largest shard, at most ``staging_buffer_bytes / 8`` elements, in the precision
      of gradients or parameters, where the step in memory finds them in another tier;
    - elementwise: the largest shard's gradient in fp32 where the optimizer's own code steps state in memory;
      where it steps state on NVMe, three chunks (an eighth of the ring each, at most) and the gradient and
      parameters of one;
    - ring: ``staging_buffer_bytes`` where optimizer state is on NVMe;
    - gradient_staging: for as many of the largest shards as reductions to the host may run, where gradients
      from an accelerator add up there;
    - bounce_buffer: twelve of the largest shard that is copied, at most ``staging_buffer_bytes``.
    """
    demands = tuple(demands_of_a_step(units, config, used_up))
    pool = plan_pool(demands)
    bounce = _bounce_bytes(units, config) if accelerated else 0
    if step is None:
        return Staging(pool, demands, dict.fromkeys(MEMORY, StagingSizes()), 0, bounce_buffer=bounce)
    trained = [unit for unit in units if unit.trained]

    def one_pass(unit: UnitSpec) -> bool:
        return step.streams or (step.fused and not is_stored(unit.placement.optimizer_tier))

    state = sum(step.sizes)
    chunk = 0 if step.streams else stream_chunk_elements(config.offload.staging_buffer_bytes, step.sizes)
    buffers: dict[Tier, StagingSizes] = {}
    for tier in MEMORY:
        near = [unit for unit in trained if (unit.placement.optimizer_tier == "device") == (tier == "device")]
        sizes = [
            (
                _gradient_bytes(unit, config, chunk, one_pass(unit) and accelerated),
                _output_bytes(unit, config, one_pass(unit), accelerated),
                0 if one_pass(unit) else _elementwise_bytes(unit, chunk, state, config),
            )
            for unit in near
        ]
        buffers[tier] = StagingSizes(*map(max, zip(*sizes, strict=True)))
    ring = config.offload.staging_buffer_bytes if is_stored(config.offload.optimizer) else 0
    gradients = _gradient_staging_bytes(trained, config) if accelerated else 0
    return Staging(pool, demands, buffers, ring, gradients, bounce, _autograd_bytes(trained))


def gradient_spans(blocks: Sequence[tuple[int, int] | None]) -> list[tuple[int, int]]:
    """Return for each parameter the first and last one among which its gradient may come in any order.

    These are the parameters of its block, or up to ``_NEIGHBORS`` consecutive ones outside blocks, as in
    embeddings or a head. ``blocks`` are the first and last parameter of each one's block, None outside.
    """
    found: list[tuple[int, int]] = []
    run = 0
    for number, block in enumerate(blocks):
        if block is not None:
            found.append(block)
            run = 0
            continue
        run = run + 1 if run < _NEIGHBORS else 1
        found += [(number, number)]
        found[number - run + 1 :] = [(number - run + 1, number)] * run
    return found


def bucket_groups(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Group tensors of ``sizes`` elements into buckets, by number.

    A bucket holds consecutive tensors of at most ``limit`` elements in sum, or one larger tensor.
    """
    groups: list[list[int]] = []
    filled = 0
    for number, size in enumerate(sizes):
        if not groups or filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(number)
        filled += size
    return groups


def _autograd_bytes(trained: Sequence[UnitSpec]) -> int:
    # Of those that may be complete at the same parameter, a block's own unit has what forward uses first.
    when = {id(unit): unit.grads_end or (0, 0) for unit in trained}
    backward = sorted(trained, key=lambda unit: (when[id(unit)][0], -when[id(unit)][1]))[::-1]
    return autograd_gradient_bytes(
        UnitGradientBytes(unit.nbytes, unit.largest_bytes, unit.shared_bytes) for unit in backward
    )


def _chunk_bytes(unit: UnitSpec, config: ZeroConfig, itemsize: int, chunks: int = 1) -> int:
    """Return the bytes of that many ``chunks``, which have the elements of one chunk in sum."""
    elements = staging_chunk_elements(config.offload.staging_buffer_bytes) // chunks
    return chunks * extent_bytes(min(unit.owned_numel, elements) * itemsize)


def _gradient_staging_bytes(trained: Sequence[UnitSpec], config: ZeroConfig) -> int:
    if config.batch.gradient_accumulation_steps == 1:
        return 0
    sums = BYTES_OF_DTYPE[config.precision.grad_accum_dtype]
    shards = [
        unit.shard_numel * (unit.itemsize if unit.world_size == 1 else sums)
        for unit in trained
        if TIERS[unit.placement.grads_tier].memory == "host"
    ]
    return (SHARD_TRANSFERS_IN_FLIGHT + 1) * extent_bytes(max(shards, default=0))


def _bounce_bytes(units: Sequence[UnitSpec], config: ZeroConfig) -> int:
    widest = BYTES_OF_DTYPE[config.precision.grad_accum_dtype]
    shards = [0]
    for unit in units:
        if is_stored(unit.placement.params_tier):
            shards.append(unit.shard_numel * unit.itemsize)
        if is_stored(unit.placement.grads_tier):
            shards.append(unit.shard_numel * max(unit.itemsize, widest))
    return min(2 * SLOTS * extent_bytes(max(shards)), config.offload.staging_buffer_bytes // _GRAIN * _GRAIN)


def _gradient_bytes(unit: UnitSpec, config: ZeroConfig, chunk: int, far: bool) -> int:
    """Bytes; ``chunk`` elements are what torch's own code reads of a gradient on NVMe, and ``far`` says that
    the fused step there does not reach the device. Delayed updates work on copies."""
    if config.offload.update_mode == "delayed":
        return 0
    placement = unit.placement
    tier = placement.grads_tier
    summed = BYTES_OF_DTYPE[config.precision.grad_accum_dtype]
    width = summed if config.batch.gradient_accumulation_steps > 1 else unit.itemsize
    if far and _is_far(placement):
        # These are full chunks of the state, also for unannounced accumulation.
        return _chunk_bytes(unit, config, max(width, summed), 2) if tier == "device" else 0
    if is_stored(placement.optimizer_tier):
        return extent_bytes(min(unit.owned_numel, chunk) * width) if is_stored(tier) else 0
    return 0 if share_memory(tier, placement.optimizer_tier) else _chunk_bytes(unit, config, width)


def _is_far(placement: StatePlacement) -> bool:
    """Return whether state is on NVMe, and gradients or parameters on the device."""
    return is_stored(placement.optimizer_tier) and "device" in (placement.params_tier, placement.grads_tier)


def _output_bytes(unit: UnitSpec, config: ZeroConfig, fused: bool, accelerated: bool) -> int:
    placement = unit.placement
    tier = placement.params_tier
    delayed = config.offload.update_mode == "delayed"  # then parameters follow the masters after the step
    if accelerated and fused and not delayed and _is_far(placement):
        return _chunk_bytes(unit, config, unit.itemsize, 2) if tier == "device" else 0
    in_place = is_stored(placement.optimizer_tier) or share_memory(tier, placement.optimizer_tier)
    if in_place or ((delayed or not fused) and not is_stored(tier)):
        return 0
    return _chunk_bytes(unit, config, unit.itemsize)


def _elementwise_bytes(unit: UnitSpec, chunk: int, state: int, config: ZeroConfig) -> int:
    """Bytes; in storage an element has ``state`` bytes of master weight and others."""
    if not is_stored(unit.placement.optimizer_tier):
        return unit.owned_numel * 4
    stored = is_stored(unit.placement.params_tier) and config.offload.update_mode != "delayed"
    return chunk_buffer_bytes(chunk, state, unit.itemsize if stored else 0)
