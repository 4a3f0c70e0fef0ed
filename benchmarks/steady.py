"""A thousand steps: page faults, growth of the resident set and allocations, against their bars.

Run from the repository root: python -m benchmarks.steady [--model llama-128x4] [--steps 1000] [--only stage3]
"""

import os
from collections import Counter
from typing import Annotated, Any

import typer

from benchmarks.harness.environment import describe
from benchmarks.harness.ranks import Team, TeamFailure
from benchmarks.harness.report import Table, conclude, terminal
from benchmarks.harness.shapes import shape_named
from benchmarks.peers import contender_named

CONTENDERS = "stage3,stage3-stored"
# Or it would hand the memory of activations back at every step and fault it in again.
KEEP_FREED = {name: str(4 * 2**30) for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")}
WARM_UP = 2
PAGE = 4096
FAULTS_BAR = 0.01  # of the pages gathered
GROWTH_BAR = 8 * 2**20


def measure_steady(key: str, model: str, steps: int) -> dict[str, Any]:
    """Figures of the steps after the second, in fresh processes; of each the worst rank."""
    contender = contender_named(key)
    with Team(contender.title, contender.ranks, contender.threads) as team:
        team.start(contender, shape_named(model).name)
        team.ask("steps", unmeasured=WARM_UP, measured=0)
        staging = team.ask("staging")
        answers = team.ask("steady", steps=steps - WARM_UP)
        grown = team.ask("staging") != staging
    faults = max(answer["faults"] * PAGE / answer["gathered"] for answer in answers)
    growth = max(answer["growth"] for answer in answers)
    allocations = sum((Counter(answer["allocations"]) for answer in answers), Counter())
    return {
        "contender": key,
        "steps": steps,
        "faults_a_step": max(answer["faults"] for answer in answers) / (steps - WARM_UP),
        "pages_a_step": answers[0]["gathered"] // PAGE / (steps - WARM_UP),
        "faults": faults,
        "growth": growth,
        "allocations": dict(allocations),
        "staging": staging[0],
        "seconds": max(answer["seconds"] for answer in answers),
        "met": faults < FAULTS_BAR and growth <= GROWTH_BAR and not allocations and not grown,
    }


def steady_table(rows: list[dict[str, Any]], model: str) -> Table:
    """What was measured, and whether it meets the bars."""
    table = Table(
        f"From step {WARM_UP + 1} on, {model}",
        (
            "contender",
            "steps",
            "page faults a step",
            "pages gathered a step",
            "ratio",
            "resident growth, KiB",
            "allocations",
            "staging, KiB",
            "bars met",
        ),
        note=f"Bars: minor page faults below {FAULTS_BAR:.0%} of the pages gathered, growth at most"
        f" {GROWTH_BAR >> 20} MiB, no tensor memory of 64 KiB or more allocated by zero_ext's own code,"
        " staging constant. The worst rank. Faults and growth are of whole processes, activations and what"
        f" autograd makes included, for which glibc is told to keep freed memory ({', '.join(KEEP_FREED)}).",
    )
    for row in rows:
        table.rows.append(
            [
                contender_named(row["contender"]).title,
                str(row["steps"]),
                f"{row['faults_a_step']:.2f}",
                f"{row['pages_a_step']:,.0f}",
                f"{row['faults']:.3%}",
                f"{row['growth'] / 1024:,.0f}",
                str(sum(row["allocations"].values())),
                f"{sum(row['staging'].values()) / 1024:,.0f}",
                "yes" if row["met"] else "no",
            ]
        )
    return table


def main(
    model: Annotated[str, typer.Option(help="A shape: 34m, llama-WIDTHxDEPTH.")] = "llama-128x4",
    steps: Annotated[int, typer.Option(min=10, help="Steps of each contender.")] = 1000,
    only: Annotated[str, typer.Option(help="Comma-separated contenders.")] = CONTENDERS,
) -> None:
    """Measure that a step allocates nothing; write the result."""
    console, rows, failures = terminal(), [], []
    os.environ.update(KEEP_FREED)  # for the ranks
    with console.status("starting") as status:
        for key in only.split(","):
            status.update(key)
            try:
                rows.append(measure_steady(key, model, steps))
            except TeamFailure as failure:
                failures.append(f"{key}: {failure}")
    table = steady_table(rows, model)
    data = {"environment": describe(), "rows": rows, "failures": failures}
    if not all(row["met"] for row in rows):
        failures.append("a bar is missed")
    conclude(console, "steady", "A steady state", [table], data, failures)


if __name__ == "__main__":
    typer.run(main)
