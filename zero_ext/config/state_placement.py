"""The placement of each state kind: replicated or sharded, and its tier. A ZeRO stage is a named preset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zero_ext.config.sections.offload import OffloadConfig, Tier


@dataclass(frozen=True)
class StatePlacement:
    """The state kinds that are sharded over the ranks (ZeRO, Rajbhandari et al. 2020, section 5), and in
    which tier the shards are (ZeRO-Infinity, Rajbhandari et al. 2021, section 5.1). Replicated kinds are on
    the device.
    """

    params: bool
    grads: bool
    optimizer: bool
    params_tier: Tier = "device"
    grads_tier: Tier = "device"
    optimizer_tier: Tier = "device"

    @staticmethod
    def of_stage(stage: int) -> StatePlacement:
        """Return the preset of ZeRO stage 0, 1, 2 or 3; anything else raises ``ValueError``."""
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"stage: expected a ZeRO stage 0, 1, 2 or 3, got {stage!r}. Choose one of them.")
        return StatePlacement(params=stage >= 3, grads=stage >= 2, optimizer=stage >= 1)

    def on_tiers(self, policy: OffloadConfig) -> StatePlacement:
        """Return the same with every kind in the tier that ``policy`` names."""
        return replace(
            self, params_tier=policy.params, grads_tier=policy.grads, optimizer_tier=policy.optimizer
        )

    def optimizer_on_device(self) -> StatePlacement:
        """Return the same with optimizer and gradients on the device."""
        return replace(self, grads_tier="device", optimizer_tier="device")

    def persistent(self) -> StatePlacement:
        """Return the same with replicated parameters: for units too small to be worth gathering."""
        return replace(self, params=False, params_tier="device")

    def consuming_gradients(self, world_size: int) -> StatePlacement:
        """Return the same where a unit's gradient is used up by its update in backward: it is not replicated
        for longer than its reduction unless a replicated optimizer needs it."""
        return replace(self, grads=self.grads or self.optimizer or world_size == 1)

    def on_ranks(self, world_size: int) -> StatePlacement:
        """Return what remains of it on ``world_size`` ranks: a single rank's shard is the whole, and is a
        shard in its own right only if it lies elsewhere than on the device. The optimizer works on the
        parameters' shards where there are any.
        """
        if world_size > 1:
            return self
        return replace(
            self,
            params=self.params_tier != "device",
            grads=self.grads_tier != "device",
            optimizer={self.optimizer_tier, self.params_tier} != {"device"},
        )


def largest_within_ratio(sizes: Sequence[int], ratio: float) -> frozenset[int]:
    """Return indices of ``sizes`` with a sum of at most ``ratio`` of the whole: from the largest down, each
    that fits, of equal ones the earlier. The same on every rank that asks the same.
    """
    budget = ratio * sum(sizes)
    chosen = []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        if sizes[index] <= budget:
            chosen.append(index)
            budget -= sizes[index]
    return frozenset(chosen)
