"""Share of a stage 3 step that is forward and backward: the plain model on as many ranks, in turn in one run.

Run from the repository root: python -m benchmarks.compute_share [--models 34m,239m] [--tokens 128]
"""

from dataclasses import asdict
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.harness.duel import Record, run_in_turn
from benchmarks.harness.environment import describe
from benchmarks.harness.ranks import TeamFailure
from benchmarks.harness.report import Table, conclude, terminal
from benchmarks.harness.shapes import SEQUENCE_LENGTH, shape_named
from benchmarks.harness.statistics import agree, ratio_of_rounds
from benchmarks.harness.workload import Workload
from benchmarks.peers import contender_named

SUBJECT, BOUND = "stage3", "compute"
# Lowest share that passes, by model and tokens, of two ranks.
BARS = {("34m", 128): 0.80, ("239m", 128): 0.80, ("34m", 1024): 0.97, ("239m", 512): 0.95}


def share_row(model: str, tokens: int, records: dict[str, Record]) -> dict[str, Any]:
    """Time of forward and backward alone over that of the step, and whether both began with equal losses."""
    bound, subject = records[BOUND], records[SUBJECT]
    share, bar = ratio_of_rounds(bound.seconds, subject.seconds), BARS.get((model, tokens))
    return {
        "model": model,
        "tokens": tokens,
        "compute_ms": 1e3 * median(bound.seconds),
        "step_ms": 1e3 * median(subject.seconds),
        "share": asdict(share),
        "bar": bar,
        "met": None if bar is None else share.at_least(bar),
        # The bound does not train, so only the losses of the first weights are comparable.
        "first_losses_agree": agree(bound.losses[:1], subject.losses[:1]),
    }


def share_table(rows: list[dict[str, Any]], rounds: int, steps: int, workload: Workload) -> Table:
    """The shares and their bars."""
    table = Table(
        "Share of compute in a step of stage 3",
        (
            "model",
            "tokens",
            "compute ms",
            "step ms",
            "share",
            "95% interval",
            "bar",
            "met",
            "same start",
        ),
        note=f"Share: time of forward and backward alone over that of a step, median over {rounds} rounds of"
        f" {steps} steps each, both in turn. Compute: the plain bfloat16 model without optimizer and"
        " communication, its own batch on every rank, all ranks simultaneously."
        f" {workload.described()}.",
    )
    for row in rows:
        share, bar = row["share"], row["bar"]
        table.rows.append(
            [
                row["model"],
                f"{row['tokens']:,}",
                f"{row['compute_ms']:.1f}",
                f"{row['step_ms']:.1f}",
                f"{share['median']:.3f}",
                f"{share['low']:.2f}–{share['high']:.2f}",
                "" if bar is None else f"≥ {bar:.2f}",
                "" if bar is None else ("yes" if row["met"] else "no"),
                "yes" if row["first_losses_agree"] else "NO",
            ]
        )
    return table


def missed_shares(rows: list[dict[str, Any]]) -> list[str]:
    """The shares that miss their bar, and those of a bound that computes something else."""
    missed = [
        f"{row['model']}, {row['tokens']} tokens: share {row['share']['median']:.3f} "
        f"({row['share']['low']:.3f}–{row['share']['high']:.3f}), at least {row['bar']:g} expected"
        for row in rows
        if row["met"] is False
    ]
    other = [row for row in rows if not row["first_losses_agree"]]
    return missed + [f"{row['model']}, {row['tokens']} tokens: first losses differ" for row in other]


def main(
    models: Annotated[str, typer.Option(help="Comma-separated shapes: tiny, 34m, 239m.")] = "34m,239m",
    tokens: Annotated[int, typer.Option(help="Tokens of a rank's micro-batch.")] = SEQUENCE_LENGTH,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each gives one share.")] = 9,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of a side in a round.")] = 4,
    warm_up: Annotated[int, typer.Option(min=1, help="Steps of each side before the first round.")] = 4,
) -> None:
    """Time stage 3 against its own forward and backward; write the result."""
    console = terminal()
    try:
        shapes = [shape_named(name) for name in models.split(",")]
        workload = Workload(contender_named(SUBJECT).ranks, tokens)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    rows: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    failures: list[str] = []
    with console.status("starting") as status:
        for shape in shapes:
            sides = (BOUND, SUBJECT)
            try:
                records = run_in_turn(
                    sides, shape.name, rounds, steps, warm_up, status.update, workload=workload
                )
            except (TeamFailure, MemoryError) as failure:
                failures.append(f"{shape.name}: {failure}")
                continue
            rows.append(share_row(shape.name, tokens, records))
            runs.append(
                {"model": shape.name, "records": {key: asdict(each) for key, each in records.items()}}
            )
    data = {"environment": describe(), "shares": rows, "runs": runs, "failures": failures}
    table = share_table(rows, rounds, steps, workload)
    heading = "Share of compute in a step"
    conclude(console, "compute_share", heading, [table], data, [*failures, *missed_shares(rows)])


if __name__ == "__main__":
    typer.run(main)
