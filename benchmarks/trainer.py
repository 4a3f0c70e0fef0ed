"""The Trainer and Accelerate with zero_ext against its own loop, and against the Trainer with DeepSpeed.

Run from the repository root: python -m benchmarks.trainer [--models 34m] [--rounds 9] [--steps 8]
"""

from typing import Annotated

import typer

from benchmarks.harness.environment import describe
from benchmarks.harness.matches import TRAINER_MATCHES
from benchmarks.harness.report import conclude, terminal
from benchmarks.harness.shapes import shape_named
from benchmarks.step import measure, missed_bars, ratios_table, times_table


def main(
    models: Annotated[str, typer.Option(help="Comma-separated shapes: tiny, 34m, 239m.")] = "34m",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each gives one ratio.")] = 9,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of a contender in a round.")] = 8,
    warm_up: Annotated[int, typer.Option(min=1, help="Steps of each contender before the first round.")] = 4,
) -> None:
    """Time their steps, print the ratios, write the result."""
    console = terminal()
    try:
        shapes = [shape_named(name) for name in models.split(",")]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    runs, rows, failures = measure(shapes, list(TRAINER_MATCHES), rounds, steps, warm_up, console)
    tables = [ratios_table(rows, rounds, steps), times_table(runs)]
    data = {"environment": describe(), "comparisons": rows, "runs": runs, "failures": failures}
    conclude(
        console,
        "trainer",
        "Trainer and Accelerate against the engine's own loop",
        tables,
        data,
        [*failures, *missed_bars(rows)],
    )


if __name__ == "__main__":
    typer.run(main)
