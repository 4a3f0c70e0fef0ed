"""Time of work on a device: events on a GPU, contenders in turn, medians over rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from benchmarks.gpu.result import Budget, Times

Work = Callable[[], object]
LEAST_ROUNDS, MOST_ROUNDS = 3, 21


class Clock:
    """Measures on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def synchronize(self) -> None:
        """The host waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def seconds(self, work: Work, times: int = 1) -> float:
        """Seconds of one call of `work`, on average over `times` in a row."""
        self.synchronize()
        if self._device.type != "cuda":
            began = time.perf_counter()
            for _ in range(times):
                work()
            return (time.perf_counter() - began) / times
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / times

    def wall_seconds(self, work: Work) -> float:
        """Seconds of one call on the host's clock until the device has finished, for work on both."""
        self.synchronize()
        began = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - began

    def in_turn(
        self, contenders: Mapping[str, Work], seconds: float, *, times: int = 1, wall: bool = False
    ) -> dict[str, Times]:
        """Rounds in which everyone has a turn, forwards and backwards, until `seconds` are over.

        Each makes one call before the first round that does not count. A turn is `times` calls, on the
        device's clock, or one on the host's with `wall`.
        """
        measure = self.wall_seconds if wall else lambda work: self.seconds(work, times)
        budget = Budget(seconds)
        for work in contenders.values():
            self.seconds(work)
        found: dict[str, list[float]] = {name: [] for name in contenders}
        longest, number = 0.0, 0
        while number < MOST_ROUNDS and (number < LEAST_ROUNDS or budget.left() > longest):
            before = budget.left()
            names = list(contenders)[:: 1 if number % 2 == 0 else -1]
            for name in names:
                found[name].append(measure(contenders[name]))
            longest, number = max(longest, before - budget.left()), number + 1
        return {name: Times(values) for name, values in found.items()}
