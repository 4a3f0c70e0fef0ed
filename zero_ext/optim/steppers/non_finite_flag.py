"""The flag that optimizer updates raise where their results are not finite."""

from __future__ import annotations

import torch

from zero_ext import ops


class NonFiniteFlag:
    """A flag that is raised when an update makes a master weight or moment NaN or infinite.

    There is one flag for each device that has state, so that an update never waits for another device.
    """

    def __init__(self) -> None:
        self._flags: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the flag, int32 [1], that kernels on ``device`` raise."""
        if device not in self._flags:
            self._flags[device] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._flags[device]

    def check(self, values: torch.Tensor) -> None:
        """Raise the flag if ``values`` [n] hold NaN or infinity. An accelerator is not waited for."""
        ops.flag_non_finite_(values, self.on(values.device))

    def is_raised_on(self, device: torch.device) -> bool:
        """Return whether it was raised by kernels on ``device``, which is waited for."""
        return device in self._flags and bool(self._flags[device])

    def is_raised(self) -> bool:
        """Return whether it was raised; every device that has state is waited for."""
        return any(map(bool, self._flags.values()))

    def lower(self) -> None:
        """Lower the flag."""
        for flag in self._flags.values():
            flag.zero_()


def flag_on(flag: NonFiniteFlag | None, device: torch.device) -> torch.Tensor | None:
    """Return what an op takes as its flag on ``device``, None where it is not read."""
    return None if flag is None else flag.on(device)
