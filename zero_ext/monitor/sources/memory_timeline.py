"""The memory of a rank over time: bytes by tier and kind, of gathered units, and of the process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from zero_ext.config import Tier
from zero_ext.monitor.sources.process_memory import resident_bytes
from zero_ext.zero.engine import Engine


@dataclass(frozen=True)
class MemorySample:
    """Bytes at ``seconds`` (of ``time.perf_counter``): the engine's memory breakdown by tier and kind, the
    process's resident set, and what torch's allocator has given out on an accelerator (None on a CPU).
    """

    seconds: float
    held: dict[Tier, dict[str, int]]
    process: int
    allocated: int | None


class MemoryTimeline:
    """Samples of one rank, in order of time; ``live`` holds seconds and bytes of gathered units at every
    gather and release."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.samples: list[MemorySample] = []
        self.live: list[tuple[float, int]] = []

    def sample(self, engine: Engine) -> None:
        """Take a sample, which waits for nothing; no delayed update may be running."""
        device = engine.device
        allocated = torch.accelerator.memory_allocated(device) if device.type != "cpu" else None
        held = engine.memory_by_tier(wait=False)
        self.samples.append(MemorySample(time.perf_counter(), held, resident_bytes(), allocated))

    def gathered(self, seconds: float, nbytes: int) -> None:
        """Full parameters of ``nbytes`` are present from ``seconds`` on."""
        self.live.append((seconds, nbytes))

    def counters(self) -> list[dict[str, Any]]:
        """Return the timeline as counter events of a Chrome trace."""
        found = [self._counter("gathered", at, {"bytes": nbytes}) for at, nbytes in self.live]
        for sample in self.samples:
            for tier, kinds in sample.held.items():
                found.append(self._counter(f"memory {tier}", sample.seconds, kinds))
            process = {"resident": sample.process}
            if sample.allocated is not None:
                process["allocated on the device"] = sample.allocated
            found.append(self._counter("memory process", sample.seconds, process))
        return found

    def _counter(self, name: str, seconds: float, values: dict[str, int]) -> dict[str, Any]:
        return {"ph": "C", "name": name, "pid": self.rank, "ts": seconds * 1e6, "args": dict(values)}
