"""What monitors cost: steps with them and without, in turn in one run, two ranks.

Run from the repository root: python -m benchmarks.monitor [--model 34m] [--stage 3] [--rounds 9] [--pairs 40]
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.harness.environment import describe
from benchmarks.harness.ranks import Team, TeamFailure
from benchmarks.harness.report import Table, conclude, terminal
from benchmarks.harness.statistics import Ratio, ratio_of_rounds

BAR = 1.01
WORKER = "benchmarks.harness.watched"
POLICIES: dict[str, dict[str, Any]] = {
    "step breakdown": {"memory": False, "trace": {"first_step": 10**9}},
    "breakdown, memory, bytes, operations, CSV": {
        "csv": True,
        "comms": True,
        "flops": {"peak": 1e12},
        "trace": {"first_step": 10**9},
    },
    "all that and a trace": {
        "csv": True,
        "comms": True,
        "flops": {"peak": 1e12},
        "trace": {"first_step": 1, "steps": 10**9},
    },
}


@dataclass
class Run:
    """One policy: seconds a step of each round, with and without, and what the monitor itself took."""

    name: str
    on: list[float] = field(default_factory=list)
    off: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    events: float = 0.0

    def ratio(self) -> Ratio:
        """Time with over time without."""
        return ratio_of_rounds(self.on, self.off)

    def share(self) -> float:
        """What the monitor itself took, as a part of a step."""
        return median(self.own) / median(self.off)

    def met(self) -> bool:
        """Whether the cost is small enough."""
        return self.ratio().at_most(BAR)

    def figures(self) -> dict[str, Any]:
        """Everything measured, for JSON."""
        return asdict(self) | {"ratio": asdict(self.ratio()), "share": self.share(), "met": self.met()}


def measure(team: Team, runs: list[Run], rounds: int, pairs: int, folder: str) -> None:
    """All policies in turn, in every round; of the ranks the slower one counts."""
    for number in range(rounds):
        for run in runs if number % 2 == 0 else runs[::-1]:
            answers = team.ask(
                "steps", policy=POLICIES[run.name], folder=f"{folder}/{number}", pairs=pairs, seed=number
            )
            run.on.append(max(median(answer["on"]) for answer in answers))
            run.off.append(max(median(answer["off"]) for answer in answers))
            run.own.append(max(answer["own"] for answer in answers))
            run.events = max(answer["events"] for answer in answers)


def table_of(runs: list[Run], model: str, stage: int, rounds: int, pairs: int) -> Table:
    """A row a policy."""
    note = (
        f"{model}, stage {stage}, two ranks of one thread. {rounds} rounds of {pairs} pairs of steps, one "
        "with the monitors and one without, in random order; a round's time is the median of its steps, the "
        "ratio the median of the rounds' (95% interval). Own: processor time of the training thread "
        "inside the "
        "monitors."
    )
    columns = ["", "ms/step with", "without", "with / without", "bar", "met", "own µs", "of a step", "events"]
    table = Table("What monitors cost", columns, note=note)
    for run in runs:
        ratio = run.ratio()
        table.rows.append(
            [
                run.name,
                f"{1e3 * median(run.on):.2f}",
                f"{1e3 * median(run.off):.2f}",
                ratio.text(4),
                f"≤ {BAR:.2f}",
                "yes" if run.met() else "NO",
                f"{1e6 * median(run.own):.0f}",
                f"{100 * run.share():.2f}%",
                f"{run.events:.0f}",
            ]
        )
    return table


def main(
    model: Annotated[str, typer.Option(help="The Llama that trains.")] = "34m",
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 9,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of steps of each policy in a round.")] = 40,
) -> None:
    """Time steps with and without monitors; write the result."""
    console = terminal()
    runs = [Run(name) for name in POLICIES]
    with (
        tempfile.TemporaryDirectory() as folder,
        Team("zero_ext", 2, 1, worker=WORKER) as team,
        console.status(f"{model}, stage {stage}"),
    ):
        try:
            team.ask("start", shape=model, threads=1, options={"stage": stage}, warm_up=4)
            measure(team, runs, rounds, pairs, folder)
        except TeamFailure as error:
            print(f"FAILED: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
    table = table_of(runs, model, stage, rounds, pairs)
    environment = describe() | {"load average at the end": f"{os.getloadavg()[0]:.2f}"}
    data = {"environment": environment, "results": [run.figures() for run in runs]}
    missed = [f"{run.name}: the bar is missed" for run in runs if not run.met()]
    conclude(console, "monitor", "Monitors", [table], data, missed)


if __name__ == "__main__":
    typer.run(main)
