"""Muon in zero_ext against FSDP2 with a gather-based Muon and DeepSpeed's Muon, in turn in one run.

Run from the repository root: python -m benchmarks.muon [--models 34m,239m] [--rounds 5] [--steps 1]
"""

from typing import Annotated

import typer

from benchmarks.harness.environment import describe
from benchmarks.harness.matches import MUON_MATCHES, select
from benchmarks.harness.report import conclude, terminal
from benchmarks.harness.shapes import shape_named
from benchmarks.step import measure, missed_bars, ratios_table, times_table


def main(
    models: Annotated[str, typer.Option(help="Comma-separated shapes: tiny, 34m, 239m.")] = "34m,239m",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each gives one ratio.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of a contender in a round.")] = 1,
    warm_up: Annotated[int, typer.Option(min=1, help="Steps of each contender before the first round.")] = 2,
    only: Annotated[str, typer.Option(help="Comma-separated contenders; empty: all.")] = "",
) -> None:
    """Time their steps, print the ratios, write the result."""
    console = terminal()
    try:
        shapes = [shape_named(name) for name in models.split(",")]
        matches = select(MUON_MATCHES, [key for key in only.split(",") if key])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    runs, rows, failures = measure(shapes, matches, rounds, steps, warm_up, console)
    tables = [ratios_table(rows, rounds, steps), times_table(runs)]
    data = {"environment": describe(), "comparisons": rows, "runs": runs, "failures": failures}
    conclude(console, "muon", "Steps with Muon", tables, data, [*failures, *missed_bars(rows)])


if __name__ == "__main__":
    typer.run(main)
