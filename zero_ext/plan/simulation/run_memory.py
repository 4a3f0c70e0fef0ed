"""Bytes of a run by tier, and what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from zero_ext.config.buffer_sizes import STORAGE_ALIGNMENT, communicator_bytes, extent_bytes
from zero_ext.config.full_tensor_costs import (
    full_tensor_step_bytes,
    newton_schulz_cost,
    wave_elements,
)
from zero_ext.config.optimizer_traits import OPTIMIZERS
from zero_ext.config.tiers import CAPACITIES, TIERS, Tier, is_stored
from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.planned_units import (
    hidden_matrices,
    matrix_step,
    padded_elements,
    staging_bytes,
    unit_elements_by_rule,
)
from zero_ext.plan.simulation.training_setup import PARAMETER_BYTES, Training
from zero_ext.plan.simulation.transformer_cost import ModelCost
from zero_ext.plan.state_memory import TrainingState, model_state_bytes


@dataclass(frozen=True)
class Shortfall:
    """A tier too small for what is asked of it; bytes of a device, or of a node's host memory or NVMe."""

    tier: Tier
    needed: int
    available: int

    @property
    def times(self) -> float:
        """Return what is needed over what there is."""
        return self.needed / self.available

    def __str__(self) -> str:
        missing = (self.needed - self.available) / 1e9
        where = "a device" if self.tier == "device" else "a node"
        return (
            f"{self.tier}: {self.needed / 1e9:,.1f} GB needed, {where} has {self.available / 1e9:,.1f} GB, "
            f"{missing:,.1f} GB too few"
        )


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes of a rank by tier and what for; ``ranks`` of them share host memory and NVMe of a node."""

    device: dict[str, int]
    host: dict[str, int]
    nvme: dict[str, int]
    ranks: int

    def total(self, tier: Tier) -> int:
        """Return bytes of a device, or of a node's host memory or NVMe."""
        bytes_by_use: dict[str, int] = getattr(self, tier)
        return sum(bytes_by_use.values()) * (1 if tier == "device" else self.ranks)

    def shortfalls(self, hardware: Hardware) -> tuple[Shortfall, ...]:
        """Return the tiers that are too small."""
        used = {tier: self.total(tier) for tier in CAPACITIES}
        if hardware.device_is_host:
            used["host"] += self.ranks * used.pop("device")
        available: dict[Tier, int] = {tier: getattr(hardware, f"{tier}_bytes") for tier in used}
        return tuple(
            Shortfall(tier, needed, available[tier])
            for tier, needed in used.items()
            if needed > available[tier]
        )


def excess(shortfalls: Sequence[Shortfall]) -> tuple[float, float]:
    """Return what is asked of the tier that is shortest of memory, over what it has; and the sum of all such
    ratios."""
    times = [short.times for short in shortfalls]
    return max(times, default=0.0), sum(times)


def memory_needs(model: ModelCost, training: Training, hardware: Hardware) -> MemoryNeeds:
    """Model state by :func:`model_state_bytes`, what passes through by :func:`staging_bytes`, activations,
    and what autograd and NCCL hold on the device.

    The allocator's own losses and CUDA's context are not counted.
    """
    found = state_needs(model, training, hardware)
    device, host = staging_bytes(model, training, not hardware.device_is_host)
    found.device.update(device)
    found.host.update(host)
    return found


def fits(model: ModelCost, training: Training, hardware: Hardware) -> bool:
    """Return whether every tier holds what :func:`memory_needs` asks of it."""
    if state_needs(model, training, hardware).shortfalls(hardware):
        return False
    return not memory_needs(model, training, hardware).shortfalls(hardware)


def stored_state_bytes(elements: int, fields: Sequence[tuple[int, int]], staging_buffer_bytes: int) -> int:
    """Return bytes on NVMe of the optimizer state of a range of ``elements``: chunks, as large as eight in a
    ring of ``staging_buffer_bytes`` can be with gradients and parameters in fp32, each in full blocks.
    ``fields`` are as :attr:`Training.state_fields`.
    """

    def plain(count: int) -> int:
        return sum(-(-count // shared) * nbytes for nbytes, shared in fields)

    grain = STORAGE_ALIGNMENT // PARAMETER_BYTES
    chunk = max(1, staging_buffer_bytes // 8 // (plain(grain) + 8 * grain)) * grain
    full_chunks, rest = divmod(elements, chunk)
    return full_chunks * extent_bytes(plain(chunk)) + extent_bytes(plain(rest))


def state_needs(model: ModelCost, training: Training, hardware: Hardware) -> MemoryNeeds:
    """:func:`memory_needs` without what passes through, which takes longest to work out."""
    found = MemoryNeeds({}, {}, {}, min(training.world_size, hardware.ranks_per_node))
    for kind, tier in training.tiers.items():
        getattr(found, tier)[kind] = 0
    for spread in model.spreads:
        own = training.among(spread)
        for rule, lengths in unit_elements_by_rule(model, training, spread).items():
            for elements, units in lengths.items():
                state_bytes = _state_bytes(elements, own, rule)
                for kind, tier in training.tiers.items():
                    getattr(found, tier)[kind] += units * state_bytes[kind]
    if OPTIMIZERS[training.optimizer_type].factors:
        step = matrix_step(model, training)
        tier = TIERS[training.optimizer].near
        vectors = training.owned(step.vectors, training.placement.optimizer)
        statistics = getattr(found, tier)
        statistics["optimizer"] = statistics.get("optimizer", 0) + 4 * (step.lines + vectors)
    if training.update_mode == "delayed":
        # Updates alongside the next step have gradients of their own, and host memory for the updated
        # parameters where they would have to be read from storage.
        owned = sum(
            padded_elements(model, training, spread) // training.among(spread).world_size
            for spread in model.spreads
        )
        found.host["grads"] = found.host.get("grads", 0) + owned * training.gradient_bytes
        if is_stored(training.optimizer):
            found.host["optimizer"] = found.host.get("optimizer", 0) + owned * PARAMETER_BYTES
    if training.needs_full_tensors:
        shards, ranks, largest = _matrices(model, training)
        found.device["matrices of a step"] = full_tensor_step_bytes(
            shards, ranks, largest, training.direction_bytes
        )
        if training.optimizer != "device" and not hardware.device_is_host:
            found.host["matrices of a step"] = training.direction_bytes * wave_elements(shards)
    _add_activations(found, model, training)
    if not hardware.device_is_host:
        # The machine that plans is another one: its environment says nothing about NCCL there.
        found.device["NCCL"] = communicator_bytes(training.world_size, hardware.ranks_per_node, {})
    return found


def _matrices(model: ModelCost, training: Training) -> tuple[list[int], int, tuple[int, int]]:
    """Return what a step on full matrices works on: elements of shards, of all units or in backward of one,
    the ranks that share a matrix, and the shape of the largest."""
    shards = [
        training.owned(elements, training.placement.optimizer)
        for elements, units in unit_elements_by_rule(model, training)[training.optimizer_type].items()
        for _ in range(units)
    ]
    if training.update_mode == "in_backward":
        shards = [max(shards, default=0)]
    ranks = training.world_size if training.placement.optimizer else 1
    largest = max(hidden_matrices(model), key=newton_schulz_cost, default=(0, 0))
    return shards, ranks, largest


def _state_bytes(elements: int, training: Training, rule: str) -> dict[str, int]:
    """Return bytes of the state of one unit of ``elements`` that ``rule`` steps, by kind."""
    state = TrainingState(
        {"bf16": elements},
        moments=len(OPTIMIZERS[rule].planned_moments),
        moments_dtype=training.moments_dtype,
        accumulation_steps=training.accumulation_steps,
    )
    state_bytes = asdict(model_state_bytes(training.stage, training.world_size, state))
    if training.uses_up_gradients:
        state_bytes["grads"] = 0
    elif is_stored(training.grads):  # has memory for sums in fp32, also if none are made
        state_bytes["grads"] = extent_bytes(training.owned(elements, training.placement.grads) * 4)
    if is_stored(training.optimizer):
        owned = training.owned(elements, training.placement.optimizer)
        ring = training.staging_buffer_bytes // len(training.rules)
        state_bytes["optimizer"] = stored_state_bytes(owned, training.state_fields(rule), ring)
    return state_bytes


def _add_activations(found: MemoryNeeds, model: ModelCost, training: Training) -> None:
    tokens = training.micro_batch * model.sequence
    if training.activations == "saved":
        found.device["activations"] = round(training.in_flight * tokens * model.activations)
        return
    found.device["activations"] = round(tokens * model.widest_block)  # a block's own while it runs again
    tier = found.host if training.activations == "recomputed_host" else found.device
    tier["outputs of blocks"] = round(training.in_flight * tokens * model.outputs)
