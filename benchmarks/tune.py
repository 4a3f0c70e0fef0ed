"""Tuning against exhaustive search on this machine: a small model, 24 configurations, each a real run.

Run from the repository root: python -m benchmarks.tune
"""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.environment import describe
from benchmarks.harness.report import Table, conclude, terminal
from benchmarks.harness.statistics import Ratio, ratio_of_rounds
from zero_ext.plan.trial import Launch, TrialOutcome, run_trial
from zero_ext.plan.tune import Point, Space, TrialResult, placements_of, search

SCRIPT = Path(__file__).parent / "tuned_script.py"  # not beside modules named like the standard library
BAR = 0.95
NOTHING_FOUND = Ratio(0.0, 0.0, 0.0, 0)


def every_point(space: Space, launch: Launch, repeats: int) -> dict[Point, TrialOutcome]:
    """The best of some runs of each point, the points in turn."""
    found: dict[Point, TrialOutcome] = {}
    for _ in range(repeats):
        for point in space:
            outcome = run_trial(launch, space.config(point))
            before = found.get(point)
            if before is None or outcome.samples_per_second > before.samples_per_second:
                found[point] = outcome
    return found


def share_of_best(space: Space, launch: Launch, chosen: Point, best: Point, rounds: int) -> Ratio:
    """The median rate of one point over the other's, run in turn: one run of each would not do."""
    if chosen == best:
        return Ratio(1.0, 1.0, 1.0, 0)
    rates: dict[Point, list[float]] = {chosen: [], best: []}
    for number in range(rounds):
        for point in (chosen, best)[:: 1 if number % 2 else -1]:
            rates[point].append(run_trial(launch, space.config(point)).samples_per_second)
    return ratio_of_rounds(rates[chosen], rates[best])


def main(
    ranks: Annotated[int, typer.Option(help="Processes of a trial.")] = 2,
    steps: Annotated[int, typer.Option(help="Measured steps of a trial.")] = 5,
    repeats: Annotated[int, typer.Option(help="Exhaustive passes; the best of each point counts.")] = 1,
    rounds: Annotated[int, typer.Option(help="Runs of the chosen and the best point, in turn.")] = 5,
    nvme: Annotated[Path, typer.Option(help="Folder for the points on NVMe.")] = Path("/tmp"),
) -> None:
    """Measure every point, then search, and compare by the exhaustive rates."""
    console = terminal()
    placements = placements_of((1, 2, 3), ("device", "nvme"))
    space = Space(
        placements[:4],
        (1, 4, 16),
        (500_000, 8_000_000),
        base={"precision": {"dtype": "fp32"}},
        ranks=ranks,
        nvme_paths=(str(nvme),),
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    launch = Launch(SCRIPT, ranks=ranks, steps=steps, timeout=120.0)
    known = every_point(space, launch, repeats)
    found = search(space, lambda config: run_trial(launch, config))
    best = max(known, key=lambda point: known[point].samples_per_second)
    share = share_of_best(space, launch, found.best.point, best, rounds) if found.best else NOTHING_FOUND
    chosen = "nothing" if found.best is None else str(found.best.point)
    table = Table(
        "Tuning against exhaustive search",
        ("configuration", "exhaustive samples/s", "tried in the search"),
        note=f"The search chose {chosen}: {share.text(3)} of the rate of the best by exhaustive search "
        f"(median and 95% interval of {rounds} runs of both in turn, at least {BAR}), with "
        f"{found.trials} runs for {len(known)} points.",
    )
    tried: dict[Point, TrialResult] = {one.point: one for one in found.measured if one.tried}
    for point, outcome in sorted(known.items(), key=lambda item: -item[1].samples_per_second):
        rate = f"{outcome.samples_per_second:,.1f}" if outcome.samples_per_second else outcome.fate
        table.rows.append([str(point), rate, "yes" if point in tried else ""])
    data = {
        "environment": describe(),
        "share_of_best": asdict(share),
        "chosen": chosen,
        "trials": found.trials,
        "points": len(known),
        "samples_per_second": {str(point): one.samples_per_second for point, one in known.items()},
    }
    missed = [] if share.at_least(BAR) else [f"{share.text(3)} of the best point's rate, bar {BAR}"]
    conclude(console, "tune", "Tuning", [table], data, missed)


if __name__ == "__main__":
    typer.run(main)
