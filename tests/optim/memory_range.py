"""Ranges in device memory, for tests of steppers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zero_ext.config import AioPolicy, OffloadPolicy
from zero_ext.offload import StepRooms, Tiers
from zero_ext.optim import OwnedRange, Segment, Stepper, Update


def device_tiers() -> Tiers:
    """Tiers of an engine that offloads nothing, with room for torch's own optimizers on small ranges."""
    return Tiers(OffloadPolicy(), AioPolicy(), {"device": StepRooms(0, 0, 4096)})


def alone(own: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The sum over one rank."""
    return own()


def memory_range(
    master: torch.Tensor, output: torch.Tensor | None, segments: tuple[Segment, ...]
) -> OwnedRange:
    """A range whose master weights and parameters are these tensors."""
    tiers = device_tiers()
    home = None if output is None else tiers.in_memory(output)
    return OwnedRange(tiers.state_home("device", master.numel(), master), home, segments)


def step_one(
    stepper: Stepper, gradient: torch.Tensor, scale: torch.Tensor, used: frozenset[str], index: int = 0
) -> None:
    """One step of range ``index``."""
    update = Update(index, device_tiers().in_memory(gradient))
    assert list(stepper.step([update], scale, used)) == [index]
