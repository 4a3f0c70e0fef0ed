"""Bytes of a run by tier, and what does not fit."""

from __future__ import annotations

from dataclasses import dataclass

from zero_ext.config import Tier
from zero_ext.config.pace import REDUCTIONS_IN_FLIGHT
from zero_ext.plan.memory import TrainingState, model_state_bytes
from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.shapes import ModelCost
from zero_ext.plan.simulation.training import PARAMETER_BYTES, Training

RING_BYTES = 64 << 20


@dataclass(frozen=True)
class Shortfall:
    """A tier too small for what is asked of it; bytes of a device, or of a node's host memory or NVMe."""

    tier: Tier
    needed: int
    available: int

    @property
    def times(self) -> float:
        """What is needed over what there is."""
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
        """Bytes of a device, or of a node's host memory or NVMe."""
        parts: dict[str, int] = getattr(self, tier)
        return sum(parts.values()) * (1 if tier == "device" else self.ranks)

    def shortfalls(self, hardware: Hardware) -> tuple[Shortfall, ...]:
        """The tiers that are too small."""
        if hardware.device_is_host:
            rooms = {"host": self.ranks * self.total("device") + self.total("host")}
        else:
            rooms = {"device": self.total("device"), "host": self.total("host")}
        rooms["nvme"] = self.total("nvme")
        tiers: tuple[Tier, ...] = ("device", "host", "nvme")
        return tuple(
            Shortfall(tier, rooms[tier], getattr(hardware, f"{tier}_bytes"))
            for tier in tiers
            if rooms.get(tier, 0) > getattr(hardware, f"{tier}_bytes")
        )


def memory_needs(model: ModelCost, training: Training, hardware: Hardware) -> MemoryNeeds:
    """Model state by :func:`model_state_bytes`, activations, and units that are present for a while.

    Passing through: the largest unit, what is gathered ahead of it, the gradients that are whole while
    reductions are under way, what these receive and send on. In host memory the ring and, where a step finds
    gradients or parameters in another tier, room for a part of them. The allocator's own losses and the
    libraries are not counted.
    """
    placement, ranks = training.placement, min(training.world_size, hardware.ranks_per_node)
    state = TrainingState(
        {"bf16": model.parameters},
        moments_dtype=training.moments_dtype,
        accumulation_steps=training.accumulation_steps,
    )
    kept = model_state_bytes(training.stage, training.world_size, state, delayed=training.step == "delayed")
    found = MemoryNeeds({}, {}, {}, ranks)
    used_up = training.step == "in_backward" and not training.clipping and training.accumulation_steps == 1
    tier_of: dict[str, Tier] = {
        kind: getattr(placement, f"{kind}_tier") if getattr(placement, kind) else "device"
        for kind in ("params", "grads", "optimizer")
    }
    for kind, tier in tier_of.items():
        getattr(found, tier)[kind] = 0 if kind == "grads" and used_up else getattr(kept, kind)
    staging = RING_BYTES if tier_of["optimizer"] == "nvme" else 0
    if tier_of["optimizer"] == "host":
        part = min(_largest_units(model, training)[0] // training.world_size, RING_BYTES // 8)
        staging += part * training.gradient_bytes if tier_of["grads"] == "device" else 0
        staging += part * PARAMETER_BYTES if tier_of["params"] == "device" else 0
    if staging:
        found.host["staging"] = staging
    _add_passing(found, model, training)
    _add_activations(found, model, training)
    return found


def _add_passing(found: MemoryNeeds, model: ModelCost, training: Training) -> None:
    """What ``plan_staging`` sets aside of the pool, by the sizes of the two largest kinds of units."""
    placement, ranks, passing = training.placement, training.world_size, 0.0
    largest, next_one = _largest_units(model, training)
    if placement.params:
        least = 2 if placement.params_tier == "nvme" else 1
        ahead = max(least * next_one, min(training.prefetch_elements, model.parameters - largest))
        passing += min(largest + ahead, model.parameters) * PARAMETER_BYTES
    if placement.grads:
        whole = min(largest + REDUCTIONS_IN_FLIGHT * next_one, model.parameters)
        passing += whole * PARAMETER_BYTES
    if ranks > 1:
        # Where parameters stay, buckets end together: what comes from other ranks is there for one more.
        under_way = REDUCTIONS_IN_FLIGHT - (1 if placement.params else 0)
        received = min(largest + under_way * next_one, model.parameters)
        width = PARAMETER_BYTES if placement.grads else training.gradient_bytes
        passing += received * width * (ranks - 1) / ranks
        if placement.grads and placement.grads_tier != "device":
            passing += received / ranks * training.gradient_bytes  # on its way to its tier
    found.device["passing through"] = round(passing)


def _largest_units(model: ModelCost, training: Training) -> tuple[int, int]:
    """Elements of the largest unit and of the largest kind that there are several of. In stages below 3 units
    are buckets, which end with the tensor that fills them; a third of a layer is its largest one."""
    largest, several = model.largest_unit, model.commonest_unit
    if not training.placement.params:
        layer, tensor = several, several // 3
        several = tensor if tensor > training.bucket_elements else training.bucket_elements + tensor
        largest = max(largest if largest > layer else 0, several)
    return min(largest, model.parameters), min(several, model.parameters)


def _add_activations(found: MemoryNeeds, model: ModelCost, training: Training) -> None:
    tokens = training.micro_batch * model.sequence
    if training.activations == "kept":
        found.device["activations"] = round(tokens * model.activations)
        return
    outputs = round(tokens * model.outputs)
    found.device["activations"] = round(tokens * model.widest_block)  # a block's own while it runs again
    tier = found.host if training.activations == "recomputed_host" else found.device
    tier["outputs of blocks"] = outputs
