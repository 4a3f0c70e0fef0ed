"""Writes to the values that stand for released parameters, which nothing else shows."""

from __future__ import annotations

import torch

from zero_ext.zero.placeholder import are_blank


class Blanks:
    """Which of the ``elements`` behind a unit's placeholders hold something else than they were made with.

    A placeholder can be written through ``parameter.data``, by ``zero_``, ``fill_`` and, if it has one
    element, by anything: torch sees no overlap in these, and no version tells. On an accelerator the host
    does not wait to see the values: it looks at a copy that an earlier call asked for, so a write is told by
    a later call. Nothing undoes it meanwhile.
    """

    def __init__(self, elements: torch.Tensor) -> None:
        self._elements = elements
        self._seen: torch.Tensor | None = None
        self._arrived: torch.Event | None = None

    def written(self) -> list[int]:
        """Indices of the elements that were written to."""
        if self._elements.device.type == "cpu":
            return _written(self._elements)
        found: list[int] = []
        if self._seen is not None and self._arrived is not None and self._arrived.query():
            found = _written(self._seen)
            self._arrived = None
        if self._arrived is None:
            self._look()
        return found

    def _look(self) -> None:
        if self._seen is None:
            self._seen = torch.empty_like(self._elements, device="cpu", pin_memory=True)
        self._seen.copy_(self._elements, non_blocking=True)
        self._arrived = torch.accelerator.current_stream(self._elements.device).record_event()


def _written(elements: torch.Tensor) -> list[int]:
    blank = are_blank(elements)
    return [] if bool(blank.all()) else (~blank).nonzero().flatten().tolist()
