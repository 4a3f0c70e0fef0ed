"""Torch's default generator of a device."""

from __future__ import annotations

import torch


class DefaultGenerator:
    """The generator that random ops on ``device`` use where none is given."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def state(self) -> torch.Tensor:
        """Return a copy of the state, bytes in host memory."""
        if self.device.type == "cpu":
            return torch.get_rng_state()
        return torch.get_device_module(self.device).get_rng_state(self.device)

    def restore(self, state: torch.Tensor) -> None:
        """Go on from :meth:`state`."""
        if self.device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(self.device).set_rng_state(state, self.device)

    def seed(self, seed: int) -> None:
        """Begin anew; generators of other devices stay as they are."""
        if self.device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            with torch.accelerator.device_index(self.device.index):
                torch.get_device_module(self.device).manual_seed(seed)

    def initial_seed(self) -> int:
        """Return the seed that the state began from."""
        if self.device.type == "cpu":
            return torch.default_generator.initial_seed()
        with torch.accelerator.device_index(self.device.index):
            return int(torch.get_device_module(self.device).initial_seed())
