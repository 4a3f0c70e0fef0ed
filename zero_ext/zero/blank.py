"""Writes to the values that stand for released parameters of one element, which nothing else shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_ext.zero.placeholder import is_blank


class Blanks:
    """Which of ``placeholders`` hold something else than what they were made with: NaN, or zero if integral.

    Writing to a placeholder of more elements is an error of torch's, since they share their memory. One
    element can be written through ``parameter.data``, and then no version tells. On an accelerator the host
    does not wait to see the values: it looks at a copy that an earlier call asked for, so a write is told by
    a later call. Nothing undoes it meanwhile.
    """

    def __init__(self, placeholders: Sequence[torch.Tensor]) -> None:
        self._single = {index: each.view(()) for index, each in enumerate(placeholders) if each.numel() == 1}
        self._seen: dict[int, torch.Tensor] = {}
        self._arrived: torch.Event | None = None

    def written(self) -> list[int]:
        """Indices of the placeholders that were written to."""
        if not self._single:
            return []
        device = next(iter(self._single.values())).device
        if device.type == "cpu":
            return _written(self._single)
        found = []
        if self._arrived is not None and self._arrived.query():
            found = _written(self._seen)
            self._arrived = None
        if self._arrived is None:
            self._look(device)
        return found

    def _look(self, device: torch.device) -> None:
        for index, value in self._single.items():
            if index not in self._seen:
                self._seen[index] = torch.empty((), dtype=value.dtype, device="cpu", pin_memory=True)
            self._seen[index].copy_(value, non_blocking=True)
        self._arrived = torch.accelerator.current_stream(device).record_event()


def _written(values: dict[int, torch.Tensor]) -> list[int]:
    return [index for index, each in values.items() if not is_blank(each)]
