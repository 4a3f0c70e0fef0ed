"""Ranges in device memory, for tests of steppers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zero_ext.config import AioConfig, OffloadConfig
from zero_ext.offload import StagingSizes, TierManager
from zero_ext.optim import OwnedRange, Segment, Stepper, Update


def device_tiers() -> TierManager:
    """Tiers of an engine that offloads nothing, with room for torch's own optimizers on small ranges."""
    return TierManager(OffloadConfig(), AioConfig(), {"device": StagingSizes(0, 0, 4096)})


def alone(own: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The sum over one rank."""
    return own()


def memory_range(
    master: torch.Tensor, output: torch.Tensor | None, segments: tuple[Segment, ...]
) -> OwnedRange:
    """A range whose master weights and parameters are these tensors."""
    tiers = device_tiers()
    storage = None if output is None else tiers.wrap_memory(output)
    return OwnedRange(tiers.allocate_optimizer_state("device", master.numel(), master), storage, segments)


def step_one(
    stepper: Stepper, gradient: torch.Tensor, scale: torch.Tensor, used: frozenset[str], index: int = 0
) -> None:
    """One step of range ``index``."""
    update = Update(index, device_tiers().wrap_memory(gradient))
    assert list(stepper.step([update], scale, used)) == [index]
