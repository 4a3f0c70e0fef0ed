"""The division of a model over the GPUs of a cluster: pipeline stages, slices of tensors, replicas
under ZeRO.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from zero_ext.plan.placement_candidates import CANDIDATES, Candidate
from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.training_setup import Training
from zero_ext.plan.state_memory import check_count


@dataclass(frozen=True)
class ParallelLayout:
    """``pp`` pipeline stages, each of ``tp`` ranks that share its tensors, as often as ``training`` has
    ranks: those are the replicas that ZeRO shards over. Ranks count with ``tp`` fastest, then the replicas.

    ``training.accumulation_steps`` are the micro-batches of a step (1F1B). Stages 0 and 1 reduce gradients
    once per step, stages 2 and 3 after every micro-batch. ``ValueError`` for lengths below 1 and fewer
    micro-batches than stages.
    """

    pp: int
    tp: int
    training: Training

    def __post_init__(self) -> None:
        check_count("pp", self.pp, 1)
        check_count("tp", self.tp, 1)
        if self.training.accumulation_steps < self.pp:
            raise ValueError(
                f"accumulation_steps: expected at least {self.pp} micro-batches, one for each pipeline "
                f"stage, got {self.training.accumulation_steps}. Raise accumulation_steps, or lower pp."
            )

    @property
    def dp(self) -> int:
        """Replicas."""
        return self.training.world_size

    @property
    def gpus(self) -> int:
        """In all."""
        return self.pp * self.dp * self.tp

    @property
    def sizes(self) -> dict[str, int]:
        """Length of every axis, the slowest to count first."""
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp}

    @property
    def placement(self) -> Candidate:
        """The ZeRO stage and tiers that the replicas shard over."""
        training = self.training
        return next(
            candidate
            for candidate in CANDIDATES
            if all(getattr(training, name) == value for name, value in candidate.options.items())
        )

    @property
    def micro_batches(self) -> int:
        """Of a replica's step."""
        return self.training.accumulation_steps

    @property
    def reduces_each(self) -> bool:
        """Return whether a pipeline reduces gradients after every micro-batch."""
        return self.pp > 1 and self.training.placement.grads

    def training_of(self, stage: int) -> Training:
        """Return what a rank of pipeline stage ``stage`` does: in 1F1B the first one starts as many
        micro-batches as there are stages before its first backward, the last one a single one (Narayanan
        et al. 2021, arXiv 2104.04473, section 2.2).
        """
        return replace(self.training, in_flight=min(self.pp - stage, self.micro_batches))

    def share_of(self, hardware: Hardware) -> Hardware:
        """Return what the replicas of one part have of each node of ``hardware``."""
        ranks = min(self.gpus, hardware.ranks_per_node)
        return hardware.shared(math.gcd(self.dp, max(1, ranks // self.tp)), ranks)

    def __str__(self) -> str:
        return f"pp={self.pp}, dp={self.dp}, tp={self.tp}"
