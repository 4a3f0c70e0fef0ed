"""The tiers of one engine: makes homes for shards and state, and owns what they share."""

from __future__ import annotations

import torch

from zero_ext.config import OffloadPolicy, Tier
from zero_ext.offload.shard_home import MemoryHome, ShardHome, allocate
from zero_ext.offload.state_home import MemoryState, StateHome
from zero_ext.offload.step_parts import StepStaging
from zero_ext.offload.transfers import TransferLog


class Tiers:
    """Device and host memory of one rank. ``transfers`` counts what moves between the tiers, ``staging`` is
    what a step in another tier than its gradients or parameters goes through."""

    def __init__(self, policy: OffloadPolicy) -> None:
        self.transfers = TransferLog()
        self.staging = StepStaging(policy.ring_bytes, self.transfers)

    def in_memory(self, tensor: torch.Tensor) -> ShardHome:
        """Device memory that exists already, as the home of a shard."""
        return MemoryHome("device", tensor, self.transfers)

    def shard_home(self, tier: Tier, numel: int, dtype: torch.dtype) -> ShardHome:
        """Zeroed room for a shard [numel] in ``tier``."""
        return MemoryHome(tier, allocate(numel, dtype), self.transfers)

    def state_home(self, tier: Tier, numel: int, master: torch.Tensor | None) -> StateHome:
        """Room for the optimizer state of ``numel`` elements in ``tier``: ``master`` if given, else zeroed
        fp32 values."""
        return MemoryState(tier, allocate(numel, torch.float32) if master is None else master)
