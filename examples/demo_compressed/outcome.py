"""Results of the modes, with losses and bytes over all ranks, and their checks."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from demo.record import mean_losses, read_records

from demo_compressed.modes import MODES
from demo_compressed.settings import CompressedSettings


@dataclass(frozen=True)
class Outcome:
    """Result of one mode.

    Attributes:
        losses: Training loss of each step, in nats per byte.
        held_out: Points (step, held-out loss).
        crossing: Bytes that all nodes send to other nodes in each step.
        seconds: Median time of a step.
    """

    name: str
    losses: list[float]
    held_out: list[tuple[int, float]]
    crossing: list[int]
    seconds: float

    @staticmethod
    def read(folder: Path, name: str) -> Outcome:
        """Load and join the records of all ranks.

        Raises:
            RuntimeError: The ranks recorded different held-out losses.
        """
        records = read_records(folder, name)
        points = {tuple(map(tuple, record["held_out"])) for record in records}
        if len(points) != 1:
            raise RuntimeError(f"{name}: expected one held-out loss on all ranks, got {sorted(points)}.")
        return Outcome(
            name,
            mean_losses(records),
            list(points.pop()),
            [sum(of_step) for of_step in zip(*(record["crossing"] for record in records), strict=True)],
            statistics.median(records[0]["seconds"]),
        )

    @property
    def end(self) -> float:
        """The held-out loss at the end."""
        return self.held_out[-1][1]

    def mean_crossing(self, first: int, last: int | None = None) -> float:
        """Return the mean bytes per step between nodes, over the steps `first` to `last` - 1."""
        return statistics.fmean(self.crossing[first:last])


@dataclass(frozen=True)
class Comparison:
    """Comparison of a compressed mode with its uncompressed mode.

    Attributes:
        fewer: Reduction factor of the bytes between nodes after the warm-up.
        fewer_in_all: Reduction factor of the bytes between nodes in the full run.
        loss_ratio: Held-out loss at the end, relative to that of the uncompressed mode.
    """

    outcome: Outcome
    fewer: float
    fewer_in_all: float
    loss_ratio: float


def compare(outcomes: dict[str, Outcome], settings: CompressedSettings) -> dict[str, Comparison]:
    """Return the comparison of every compressed mode, by name."""
    found = {}
    for name, mode in MODES.items():
        if mode.against is not None:
            own, base = outcomes[name], outcomes[mode.against]
            after = settings.warm_up
            found[name] = Comparison(
                own,
                base.mean_crossing(after) / own.mean_crossing(after),
                base.mean_crossing(0) / own.mean_crossing(0),
                own.end / base.end,
            )
    return found


def failures(
    outcomes: dict[str, Outcome], unigram: float, settings: CompressedSettings
) -> dict[str, list[str]]:
    """Return the messages of the failed checks for each mode, an empty list for a mode without any."""
    found: dict[str, list[str]] = {name: [] for name in MODES}
    for name, outcome in outcomes.items():
        if len(outcome.losses) != settings.steps:
            found[name].append(f"expected {settings.steps} steps, got {len(outcome.losses)}")
        if not outcome.end < unigram:
            found[name].append(
                f"the held-out loss ended at {outcome.end:.3f}, not below the {unigram:.3f} of byte "
                "frequencies"
            )
    for name, one in compare(outcomes, settings).items():
        mode = MODES[name]
        if not one.loss_ratio <= 1 + settings.loss_tolerance:
            found[name].append(
                f"the held-out loss ended at {one.loss_ratio:.3f} times that of {mode.against}, which is "
                f"more than {1 + settings.loss_tolerance:g}"
            )
        if not one.fewer >= mode.bar(settings):
            found[name].append(
                f"{one.fewer:.1f} times fewer bytes than {mode.against} crossed between nodes, "
                f"expected {mode.bar(settings):g}"
            )
    return found
