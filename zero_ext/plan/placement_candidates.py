"""The placements that a plan compares: every stage, and in each where what it shards may live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zero_ext.config import Tier


@dataclass(frozen=True)
class Candidate:
    """A stage and the tiers of its state kinds; ``label`` for tables."""

    stage: int
    label: str
    params: Tier = "device"
    grads: Tier = "device"
    optimizer: Tier = "device"

    @property
    def options(self) -> dict[str, Any]:
        """Return what :class:`Training` takes."""
        return {"stage": self.stage, "params": self.params, "grads": self.grads, "optimizer": self.optimizer}

    @property
    def distance(self) -> int:
        """Return how far state lies from the device, over all kinds."""
        tiers = ("device", "host", "nvme")
        return sum(tiers.index(tier) for tier in (self.params, self.grads, self.optimizer))

    def __str__(self) -> str:
        return f"stage {self.stage}, {self.label}"


CANDIDATES = (
    Candidate(0, "device"),
    Candidate(1, "device"),
    Candidate(1, "host", optimizer="host"),
    Candidate(1, "nvme", optimizer="nvme"),
    Candidate(2, "device"),
    Candidate(2, "host", grads="host", optimizer="host"),
    Candidate(2, "nvme", grads="host", optimizer="nvme"),
    Candidate(3, "device"),
    Candidate(3, "optimizer on host", grads="host", optimizer="host"),
    Candidate(3, "host", params="host", grads="host", optimizer="host"),
    Candidate(3, "optimizer on nvme", params="host", grads="host", optimizer="nvme"),
    Candidate(3, "nvme", params="nvme", grads="nvme", optimizer="nvme"),
)
