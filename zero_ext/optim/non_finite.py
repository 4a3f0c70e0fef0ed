"""The flag that optimizer updates raise where their results are not finite."""

from __future__ import annotations

import torch

from zero_ext import ops


class NonFiniteFlag:
    """A flag that is raised when an update makes a master weight or moment NaN or infinite.

    There is one flag for each device that has state, so that an update never waits for another device.
    ``waits`` says, alike on all ranks, that :meth:`lower` may tell of an update later than in the call that
    follows it: the model trains on an accelerator, which may have state.
    """

    def __init__(self, device: torch.device) -> None:
        self.waits = device.type != "cpu"
        self._flags: dict[torch.device, torch.Tensor] = {}
        self._seen: dict[torch.device, tuple[torch.Tensor, torch.Event]] = {}  # copies on their way here

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the flag, int32 [1], that kernels on ``device`` raise."""
        if device not in self._flags:
            self._flags[device] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._flags[device]

    def look(self, values: torch.Tensor) -> None:
        """Raise the flag if ``values`` [n] hold NaN or infinity. An accelerator is not waited for."""
        ops.flag_non_finite_(values, self.on(values.device))

    def lower(self) -> bool:
        """Lower the flag and return whether it was raised.

        An accelerator is not waited for: this looks at a copy that an earlier call asked for.
        """
        found = [self._raised(device, flag) for device, flag in self._flags.items()]
        raised = any(found)
        if raised:
            self._seen.clear()
            for flag in self._flags.values():
                flag.zero_()
        return raised

    def _raised(self, device: torch.device, flag: torch.Tensor) -> bool:
        if device.type == "cpu":
            return bool(flag)
        copy, arrived = self._seen.get(device, (None, None))
        if arrived is not None and not arrived.query():
            return False
        raised = copy is not None and bool(copy)
        if copy is None:
            copy = torch.empty_like(flag, device="cpu", pin_memory=True)
        copy.copy_(flag, non_blocking=True)
        self._seen[device] = copy, torch.accelerator.current_stream(device).record_event()
        return raised


def flag_on(flag: NonFiniteFlag | None, device: torch.device) -> torch.Tensor | None:
    """Return what an op takes as its flag on ``device``, None where nobody looks."""
    return None if flag is None else flag.on(device)
