"""What kept checkpoints cost: steps of a Llama whose layers are checkpointed, by where their inputs wait.

Run from the repository root: python -m benchmarks.activation [--model 239m] [--tokens 512] [--rounds 9]
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.harness.checkpointed import TORCH
from benchmarks.harness.environment import describe
from benchmarks.harness.ranks import Team, TeamFailure
from benchmarks.harness.report import Table, conclude, megabytes, terminal
from benchmarks.harness.statistics import Ratio, ratio_of_rounds

WORKER = "benchmarks.harness.checkpointed"
MODES: dict[str, dict[str, Any] | None] = {
    TORCH: None,
    "device": {},
    "one buffer": {"contiguous_memory_optimization": True, "number_checkpoints": 64},
    "host": {"tier": "host"},
    "NVMe": {"tier": "nvme"},
}
BARS = {"host": 1.05, "NVMe": 1.15}


@dataclass
class Run:
    """One way: seconds a step of each round, whether gradients are torch's, and the bytes it kept."""

    name: str
    seconds: list[float] = field(default_factory=list)
    same_bits: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def ratio(self, base: Run) -> Ratio:
        """Time over that of ``base``."""
        return ratio_of_rounds(self.seconds, base.seconds)

    def met(self, base: Run) -> bool:
        """Whether gradients are the same and the time is within its bar, if it has one."""
        return self.same_bits and self.ratio(base).at_most(BARS.get(self.name, float("inf")))

    def figures(self, base: Run) -> dict[str, Any]:
        """Everything measured, for JSON."""
        return asdict(self) | {"ratio": asdict(self.ratio(base)), "met": self.met(base)}


def measure(team: Team, runs: list[Run], rounds: int, repeats: int) -> None:
    """Gradients of all ways once, then the steps of all ways in every round, in random order."""
    (same,) = team.ask("compare")
    for number in range(rounds):
        (seconds,) = team.ask("steps", repeats=repeats, seed=number)
        for run in runs:
            run.seconds.append(median(seconds[run.name]))
    (facts,) = team.ask("modes")
    for run in runs:
        run.same_bits, run.facts = same[run.name], facts[run.name]


def table_of(runs: list[Run], model: str, tokens: int, rounds: int, repeats: int) -> Table:
    """A row a way."""
    note = (
        f"{model}, 1 × {tokens} tokens, bfloat16, AdamW, one rank with two threads; every layer is "
        f"checkpointed. {rounds} rounds of {repeats} steps each way in random order, all in one process; a "
        f"round's time is the median of its steps, the ratio to {TORCH} the median of the rounds' (95% "
        f"interval). "
        "Moved: what leaves the device after a forward; 0 where inputs stay."
    )
    columns = [
        "inputs wait in",
        "s/step",
        "ratio",
        "bar",
        "same gradients",
        "moved, MB",
        "a layer, MB",
        "met",
    ]
    table, base = Table("Checkpoints", columns, note=note), runs[0]
    for run in runs:
        ratio, bar = run.ratio(base), BARS.get(run.name)
        table.rows.append(
            [
                run.name,
                f"{median(run.seconds):.3f}",
                ratio.text(3),
                f"≤ {bar:.2f}" if bar else "–",
                "yes" if run.same_bits else "NO",
                megabytes(run.facts["saved"]),
                f"{run.facts['saved'] / run.facts['layers'] / 1e6:.2f}",
                "yes" if run.met(base) else "NO",
            ]
        )
    return table


def main(
    model: Annotated[str, typer.Option(help="The Llama that trains.")] = "239m",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 9,
    repeats: Annotated[int, typer.Option(min=1, help="Steps of each way in a round.")] = 3,
) -> None:
    """Time steps by where checkpoints wait; write the result."""
    console, runs = terminal(), [Run(name) for name in MODES]
    with Team("zero_ext", 1, 2, worker=WORKER) as team, console.status(f"{model}, {tokens} tokens"):
        try:
            team.ask("start", shape=model, threads=2, tokens=tokens, modes=MODES)
            measure(team, runs, rounds, repeats)
        except TeamFailure as error:
            print(f"FAILED: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
    table = table_of(runs, model, tokens, rounds, repeats)
    environment = describe() | {"load average at the end": f"{os.getloadavg()[0]:.2f}"}
    data = {"environment": environment, "results": [run.figures(runs[0]) for run in runs]}
    missed = [f"{run.name}: a bar is missed" for run in runs if not run.met(runs[0])]
    conclude(console, "activation", "Activation checkpointing", [table], data, missed)


if __name__ == "__main__":
    typer.run(main)
