"""Comparison of the three runs, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from demo_offload.processes import Ending
from demo_offload.settings import OffloadSettings

MEGA = 1e6
HEADINGS = ("run", "ended", "loss", "process", "device", "host", "NVMe", "s/step")
NAMES = {"plain": "PyTorch", "nvme": "zero_ext, NVMe", "memory": "zero_ext"}


@dataclass(frozen=True)
class Result:
    """All runs of a demonstration, by the names in `NAMES`. The record of a failed run is None."""

    parameters: int
    cap_bytes: int
    cap_name: str
    watched: str
    endings: dict[str, Ending]
    records: dict[str, dict[str, Any] | None]

    def losses(self, run: str) -> list[float]:
        """Return the loss of every step of a run in nats per byte, or an empty list without a record."""
        record = self.records[run]
        return record["losses"] if record is not None else []

    def peak(self, run: str, column: str) -> int:
        """Return the peak of a column of the timeline."""
        return max((getattr(sample, column) for sample in self.endings[run].timeline), default=0)


def failures(result: Result, settings: OffloadSettings, left_behind: list[str]) -> list[str]:
    """Return a message for each check that failed."""
    found = []
    plain = result.endings["plain"]
    if plain.trained:
        found.append("PyTorch alone trained under the cap: the model is too small or the cap is too large")
    elif not plain.out_of_memory:
        found.append(f"PyTorch alone failed for another reason than memory: {_words(plain)}")
    for run in ("nvme", "memory"):
        ending = result.endings[run]
        if not ending.trained:
            found.append(f"{NAMES[run]}: did not train ({ending}): {_words(ending)}")
        elif len(result.losses(run)) != settings.steps:
            found.append(f"{NAMES[run]}: expected {settings.steps} steps, got {len(result.losses(run))}")
    ours, reference = result.losses("nvme"), result.losses("memory")
    if ours and reference and ours != reference:
        found.append(f"losses on NVMe: expected those in memory {reference}, got {ours}")
    if left_behind:
        found.append(f"the NVMe folder still holds {', '.join(left_behind)}")
    return found


def rows(result: Result) -> list[list[str]]:
    """Return one row per run with cells in the order of `HEADINGS`, and peak sizes in MB (10^6 bytes)."""
    table = []
    for run, name in NAMES.items():
        losses, record = result.losses(run), result.records[run]
        seconds = sorted(record["seconds"]) if record is not None and "seconds" in record else []
        table.append(
            [
                name,
                str(result.endings[run]),
                f"{losses[-1]:.5f}" if losses else "–",
                *(megabytes(result.peak(run, column)) for column in ("resident", "device", "host", "nvme")),
                f"{seconds[len(seconds) // 2]:.1f}" if seconds else "–",
            ]
        )
    return table


def megabytes(count: float) -> str:
    """Format a number of bytes in units of 10^6."""
    return f"{count / MEGA:,.0f}"


def _words(ending: Ending) -> str:
    return f"status {ending.status}, {' / '.join(ending.last_words) or 'no output'}"
