"""Time of a training step: zero_ext against DDP, FSDP2, DeepSpeed and the plain loop, in turn in one run.

Run from the repository root: python -m benchmarks.step [--models 34m,239m] [--ranks 4] [--tokens 1024]
"""

from dataclasses import asdict
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.harness.duel import Record, run_in_turn
from benchmarks.harness.environment import describe, total_bytes
from benchmarks.harness.matches import (
    MEMORY_SHARE,
    Match,
    contenders_of,
    select,
    smaller_groups,
    split_to_fit,
    step_matches,
)
from benchmarks.harness.ranks import TeamFailure
from benchmarks.harness.report import Table, conclude, terminal
from benchmarks.harness.shapes import SEQUENCE_LENGTH, Shape, shape_named
from benchmarks.harness.statistics import agree, largest_difference, ratio_of_rounds, within
from benchmarks.harness.workload import DEFAULT_WORKLOAD, Workload
from benchmarks.peers import contender_named, titles_of
from benchmarks.peers.deepspeed_operators import compile_for

COLUMNS = ("contender", "model", "ms/step", "first loss", "last loss", "norm", "idle CPU s")


def compare(match: Match, shape: Shape, records: dict[str, Record]) -> list[dict[str, Any]]:
    """One row per peer: times, ratio, bar, and whether both trained alike."""
    subject = records[match.subject]
    rows = []
    for peer, bar in match.bars:
        ratio = ratio_of_rounds(subject.seconds, records[peer].seconds)
        rows.append(
            {
                "model": shape.name,
                "subject": match.subject,
                "peer": peer,
                "subject_ms": 1e3 * median(subject.seconds),
                "peer_ms": 1e3 * median(records[peer].seconds),
                "ratio": asdict(ratio),
                "bar": bar,
                "met": within(ratio.high, bar),
                "loss_difference": largest_difference(subject.losses, records[peer].losses),
                "losses_agree": agree(subject.losses, records[peer].losses),
                # Later norms tell little: overfitting four batches amplifies rounding, peers' differ alike.
                "norms_agree": agree(subject.norms[:1], records[peer].norms[:1]),
            }
        )
    return rows


def row_of(row: dict[str, Any]) -> list[str]:
    """A comparison as cells of the table."""
    alike = "yes" if row["losses_agree"] and row["norms_agree"] else "NO"
    ratio = row["ratio"]
    return [
        titles_of(row["subject"], row["peer"], row["model"]),
        row["model"],
        f"{row['subject_ms']:.1f}",
        f"{row['peer_ms']:.1f}",
        f"{ratio['median']:.3f}",
        f"{ratio['low']:.2f}–{ratio['high']:.2f}",
        "" if row["bar"] is None else f"≤ {row['bar']:.2f}",
        row["met"],
        f"{alike} ({row['loss_difference']:.1e})",
    ]


def missed_bars(rows: list[dict[str, Any]]) -> list[str]:
    """The comparisons that have a bar and miss it."""
    return [
        f"{row['model']}, {row['subject']} / {row['peer']}: {row['ratio']['median']:.3f} "
        f"({row['ratio']['low']:.3f}–{row['ratio']['high']:.3f}), at most {row['bar']:g} wanted"
        for row in rows
        if row["met"] == "no"
    ]


def times_table(runs: list[dict[str, Any]]) -> Table:
    """Every contender's own time and losses, one row per match it took part in."""
    table = Table("Contenders", COLUMNS)
    for run in runs:
        for key, record in run["records"].items():
            table.rows.append(
                [
                    contender_named(key, run["model"]).title,
                    run["model"],
                    f"{1e3 * median(record['seconds']):.1f}",
                    f"{record['losses'][0]:.4f}",
                    f"{record['losses'][-1]:.4f}",
                    f"{record['norms'][-1]:.4f}",
                    f"{record['idle_processor_seconds']:.2f}",
                ]
            )
    return table


def ratios_table(
    rows: list[dict[str, Any]], rounds: int, steps: int, workload: Workload = DEFAULT_WORKLOAD
) -> Table:
    """The comparison the bars speak of."""
    return Table(
        "Time of a step",
        (
            "zero_ext / peer",
            "model",
            "zero_ext ms",
            "peer ms",
            "ratio",
            "95% interval",
            "bar",
            "met",
            "trained alike (loss)",
        ),
        [row_of(row) for row in rows],
        note=f"Ratio: median over {rounds} rounds of {workload.steps_of_round(steps)} steps, contenders in"
        " turn. bfloat16"
        f" parameters, float32 masters, AdamW, clipped to norm 1. {workload.described()}."
        " Peers send through gloo, as zero_ext does where the row says gloo. In its other rows of several"
        " ranks bulk data goes directly from process to process. Trained alike: losses of all steps and the"
        " first gradient norm read within 2⁻⁷ relative.",
    )


def measure(
    shapes: list[Shape],
    matches: list[Match],
    rounds: int,
    steps: int,
    warm_up: int,
    console: Console,
    workload: Workload = DEFAULT_WORKLOAD,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """All matches on all shapes: raw runs, comparison rows, and the failures (which do not stop the rest)."""
    runs: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    compile_for(contenders_of(matches), console)
    limit, measured = int(MEMORY_SHARE * total_bytes()), workload.steps_of_round(steps)
    with console.status("starting") as status:
        for shape in shapes:
            groups = split_to_fit(matches, shape, limit, workload)
            for group in groups:
                keys = contenders_of(group)
                try:
                    records = run_in_turn(
                        keys, shape.name, rounds, measured, warm_up, status.update, workload=workload
                    )
                except (TeamFailure, MemoryError) as failure:
                    smaller = smaller_groups(group)
                    groups += smaller  # a contender that fails costs its own comparisons only
                    if not smaller:
                        failures.append(f"{shape.name}, {' / '.join(keys)}: {failure}")
                    continue
                runs.append(
                    {
                        "model": shape.name,
                        "records": {key: asdict(record) for key, record in records.items()},
                    }
                )
                rows += [row for match in group for row in compare(match, shape, records)]
    return runs, rows, failures


def main(
    models: Annotated[str, typer.Option(help="Comma-separated shapes: tiny, 34m, 239m.")] = "34m,239m",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each gives one ratio.")] = 9,
    steps: Annotated[
        int, typer.Option(min=1, help="Measured steps of a round, fewer with accumulation.")
    ] = 4,
    warm_up: Annotated[int, typer.Option(min=1, help="Steps of each contender before the first round.")] = 4,
    only: Annotated[str, typer.Option(help="Comma-separated contenders, e.g. stage3,fsdp2.")] = "",
    ranks: Annotated[
        int, typer.Option(min=0, help="Ranks of every contender; 0: two, and one against the plain loop.")
    ] = 0,
    tokens: Annotated[int, typer.Option(help="Tokens of a rank's micro-batch.")] = SEQUENCE_LENGTH,
    accumulation: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")] = 1,
) -> None:
    """Time zero_ext's steps against its peers, print the ratios, write the result."""
    console = terminal()
    try:
        shapes = [shape_named(name) for name in models.split(",")]
        workload, keys = (
            Workload(ranks or None, tokens, accumulation),
            [key for key in only.split(",") if key],
        )
        matches = {shape.name: select(step_matches(shape.name, workload), keys) for shape in shapes}
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not all(matches.values()):
        raise typer.BadParameter("--only names no zero_ext contender; add one, e.g. stage3")
    runs: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for shape in shapes:
        found = measure([shape], matches[shape.name], rounds, steps, warm_up, console, workload)
        runs += found[0]
        rows += found[1]
        failures += found[2]
    tables = [ratios_table(rows, rounds, steps, workload), times_table(runs)]
    data = {
        "environment": describe(),
        "workload": asdict(workload),
        "comparisons": rows,
        "runs": runs,
        "failures": failures,
    }
    conclude(console, "step", "Time of a training step", tables, data, [*failures, *missed_bars(rows)])


if __name__ == "__main__":
    typer.run(main)
