"""Where each state kind lives: replicated or sharded. A ZeRO stage is a named preset, nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Placement:
    """Which state kinds are sharded over the ranks (ZeRO, Rajbhandari et al. 2020, section 5)."""

    params: bool
    grads: bool
    optimizer: bool

    @staticmethod
    def of_stage(stage: int) -> Placement:
        """The preset of ZeRO stage 0, 1, 2 or 3; anything else raises ``ValueError``."""
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"stage: {stage!r} given; ZeRO has the stages 0, 1, 2 and 3")
        return Placement(params=stage >= 3, grads=stage >= 2, optimizer=stage >= 1)

    def persistent(self) -> Placement:
        """The same with replicated parameters: for units too small to be worth gathering."""
        return replace(self, params=False)

    def over(self, world_size: int) -> Placement:
        """What remains of it on ``world_size`` ranks: a single rank's shard is the whole."""
        return self if world_size > 1 else Placement(params=False, grads=False, optimizer=False)
