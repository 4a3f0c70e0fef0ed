"""Bytes of a run by tier, and what does not fit."""

from __future__ import annotations

from dataclasses import dataclass

from zero_ext.config import Tier
from zero_ext.plan.memory import TrainingState, model_state_bytes
from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.shapes import ModelCost
from zero_ext.plan.simulation.staging import staging_bytes
from zero_ext.plan.simulation.training import Training


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
    """Model state by :func:`model_state_bytes`, what passes through by :func:`staging_bytes`, activations.

    The allocator's own losses and the libraries are not counted.
    """
    found = _state_needs(model, training, hardware)
    staging = staging_bytes(model, training, not hardware.device_is_host)
    found.device["passing through"] = staging.pool
    if staging.rooms:
        found.device["staging"] = staging.rooms
    if staging.host:
        found.host["staging"] = staging.host
    _add_activations(found, model, training)
    return found


def fits(model: ModelCost, training: Training, hardware: Hardware) -> bool:
    """Whether every tier holds what :func:`memory_needs` asks of it."""
    if _state_needs(model, training, hardware).shortfalls(hardware):
        return False
    return not memory_needs(model, training, hardware).shortfalls(hardware)


def _state_needs(model: ModelCost, training: Training, hardware: Hardware) -> MemoryNeeds:
    placement, ranks = training.placement, min(training.world_size, hardware.ranks_per_node)
    state = TrainingState(
        {"bf16": model.parameters},
        moments_dtype=training.moments_dtype,
        accumulation_steps=training.accumulation_steps,
    )
    kept = model_state_bytes(training.stage, training.world_size, state, delayed=training.step == "delayed")
    found = MemoryNeeds({}, {}, {}, ranks)
    tier_of: dict[str, Tier] = {
        kind: getattr(placement, f"{kind}_tier") if getattr(placement, kind) else "device"
        for kind in ("params", "grads", "optimizer")
    }
    for kind, tier in tier_of.items():
        nbytes = 0 if kind == "grads" and training.uses_up_gradients else getattr(kept, kind)
        if kind == "grads" and tier == "nvme":  # has room for sums in fp32, also if none are made
            nbytes = nbytes * 4 // training.gradient_bytes
        getattr(found, tier)[kind] = nbytes
    return found


def _add_activations(found: MemoryNeeds, model: ModelCost, training: Training) -> None:
    tokens = training.micro_batch * model.sequence
    if training.activations == "kept":
        found.device["activations"] = round(tokens * model.activations)
        return
    outputs = round(tokens * model.outputs)
    found.device["activations"] = round(tokens * model.widest_block)  # a block's own while it runs again
    tier = found.host if training.activations == "recomputed_host" else found.device
    tier["outputs of blocks"] = outputs
