"""Exact sums of squares of what lies in memory of several devices."""

from __future__ import annotations

import torch

from zero_ext import ops


class Squares:
    """A sum of squares, exact and the same in any order; each device adds up what it holds."""

    def __init__(self, *sums: torch.Tensor) -> None:
        """Add to ``sums``, int64 [:data:`zero_ext.ops.ACCUMULATOR_ENTRIES`], one per device at most."""
        self._sums = {each.device: each for each in sums}

    def add(self, values: torch.Tensor) -> None:
        """Adds the squares of ``values`` [n]; nobody waits for the device that holds them."""
        ops.squared_norm_(values, self._sum_on(values.device))

    def add_all(self, other: Squares) -> None:
        """Adds another sum."""
        for device, sums in other._sums.items():
            self._sum_on(device).add_(sums)

    def count_non_finite(self) -> int:
        """Return how many of the values added were not finite; waits for the devices."""
        return int(self.total()[-1])

    def total(self) -> torch.Tensor:
        """All of it as an int64 superaccumulator in host memory, for :func:`zero_ext.ops.squared_norm_value`;
        waits for the devices."""
        total = torch.zeros(ops.ACCUMULATOR_ENTRIES, dtype=torch.int64, device="cpu")
        for sums in self._sums.values():
            total += sums.cpu()
        return total

    def _sum_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._sums:
            self._sums[device] = torch.zeros(ops.ACCUMULATOR_ENTRIES, dtype=torch.int64, device=device)
        return self._sums[device]
