"""What came of the ways: losses and bytes over all ranks, and every broken promise in words."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from demo.record import mean_losses, read_records

from demo_compressed.modes import MODES
from demo_compressed.settings import CompressedSettings


@dataclass(frozen=True)
class Outcome:
    """One way: training loss of each step, (step, held-out loss) points, bytes that all nodes together send
    to others in each step, and a step's median seconds."""

    name: str
    losses: list[float]
    held_out: list[tuple[int, float]]
    crossing: list[int]
    seconds: float

    @staticmethod
    def read(folder: Path, name: str) -> Outcome:
        """Puts the records of all ranks together; they must agree on the held-out loss."""
        records = read_records(folder, name)
        points = {tuple(map(tuple, record["held_out"])) for record in records}
        if len(points) != 1:
            raise RuntimeError(f"{name}: the ranks disagree on the held-out loss: {sorted(points)}")
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
        """Bytes a step between nodes, mean of the steps from `first` to before `last`."""
        return statistics.fmean(self.crossing[first:last])


@dataclass(frozen=True)
class Comparison:
    """A compressed way beside its uncompressed one: how many times fewer bytes cross between nodes after the
    warm-up and in the whole run, and its held-out loss at the end as a multiple of the other's."""

    outcome: Outcome
    fewer: float
    fewer_in_all: float
    loss_ratio: float


def compare(outcomes: dict[str, Outcome], settings: CompressedSettings) -> dict[str, Comparison]:
    """A comparison for every way that is judged against another, by name."""
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
    """Every broken promise in words, by mode; a mode that kept all has an empty list."""
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
