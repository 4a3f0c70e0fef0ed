"""Memory of a rank: zero_ext against its peers (resident and peak), and against the formula (by state kind).

Run from the repository root: python -m benchmarks.memory [--models 34m,239m] [--only stage3,fsdp2]
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import typer

from benchmarks.harness.account import account_bars, account_table, measure_account, planned_table
from benchmarks.harness.environment import describe
from benchmarks.harness.matches import MEMORY_MATCHES, Match, contenders_of, select
from benchmarks.harness.plots import plot_state_bytes
from benchmarks.harness.ranks import Team, TeamFailure
from benchmarks.harness.report import Table, conclude, megabytes, terminal
from benchmarks.harness.shapes import Shape, shape_named
from benchmarks.peers import contender_named, titles_of
from benchmarks.peers.deepspeed_operators import compile_for

RATIOS = ("overall_peak", "steps_peak", "steady")
# Highest ratio of steady bytes that passes.
STEADY_BARS = {("stage2", "deepspeed2"): 1.0, ("stage1", "deepspeed1"): 1.0}
READINGS = ("libraries", "construction_peak", "overall_peak", "steady", "steps_peak")


def measure_resident(key: str, shape: Shape, steps: int) -> dict[str, int]:
    """Resident bytes of one contender's ranks in fresh processes; each figure is the highest of its ranks.

    libraries: before the model exists. construction_peak: highest while model, engine and optimizer are made.
    overall_peak: highest from there to the end. steady: after the last step. steps_peak: highest within the
    later steps alone.
    """
    contender = contender_named(key, shape.name)
    with Team(contender.title, contender.ranks, contender.threads) as team:
        started = team.start(contender, shape.name)
        team.ask("steps", unmeasured=steps, measured=0)
        first = team.ask("memory")
        team.ask("reset_peak")
        team.ask("steps", unmeasured=steps, measured=0)
        later = team.ask("memory")
    return {
        "libraries": max(answer["before"] for answer in started),
        "construction_peak": max(answer["peak"] for answer in started),
        "overall_peak": max(answer["peak"] for answer in (*first, *later)),
        "steady": max(answer["resident"] for answer in later),
        "steps_peak": max(answer["peak"] for answer in later),
    }


def resident_readings(
    shapes: Sequence[Shape], keys: Sequence[str], steps: int, progress: Callable[[str], None]
) -> tuple[dict[str, dict[str, dict[str, int]]], list[str]]:
    """:func:`measure_resident` of every contender on every shape, and the failures."""
    readings: dict[str, dict[str, dict[str, int]]] = {shape.name: {} for shape in shapes}
    failures: list[str] = []
    for shape in shapes:
        for key in keys:
            progress(f"{shape.name}: {key}")
            try:
                readings[shape.name][key] = measure_resident(key, shape, steps)
            except TeamFailure as failure:
                failures.append(f"{shape.name}, {key}: {failure}")
    return readings, failures


def resident_table(readings: dict[str, dict[str, dict[str, int]]]) -> Table:
    """What every contender occupies, MB a rank."""
    table = Table(
        "Resident memory of a rank, MB (10⁶)",
        ("contender", "model", "libraries", "construction peak", "whole peak", "steady", "later steps' peak"),
        note="VmRSS and VmHWM of whole processes, libraries included; the highest rank. Construction: every"
        " contender builds the whole model on each rank, then shards it.",
    )
    for model, by_key in readings.items():
        for key, reading in by_key.items():
            figures = [megabytes(reading[name]) for name in READINGS]
            table.rows.append([contender_named(key, model).title, model, *figures])
    return table


def peak_rows(
    matches: list[Match], readings: dict[str, dict[str, dict[str, int]]]
) -> list[dict[str, str | float | bool | None]]:
    """zero_ext's peaks and steady bytes over its peers', like with like; the bar of peaks is 'below'."""
    rows: list[dict[str, str | float | bool | None]] = []
    for model, by_key in readings.items():
        for match in matches:
            for peer in match.peers:
                if match.subject not in by_key or peer not in by_key:
                    continue
                ours, theirs = by_key[match.subject], by_key[peer]
                bar = STEADY_BARS.get((match.subject, peer))
                rows.append(
                    {
                        "model": model,
                        "subject": match.subject,
                        "peer": peer,
                        **{name: ours[name] / theirs[name] for name in RATIOS},
                        "met": ours["overall_peak"] < theirs["overall_peak"]
                        and ours["steps_peak"] < theirs["steps_peak"],
                        "steady_bar": bar,
                        "steady_met": None if bar is None else ours["steady"] <= bar * theirs["steady"],
                    }
                )
    return rows


def peak_table(rows: list[dict[str, Any]]) -> Table:
    """The comparison the bars speak of."""
    return Table(
        "Peak and steady memory against peers",
        (
            "zero_ext / peer",
            "model",
            "whole peak",
            "peak of later steps",
            "both peaks below",
            "steady",
            "steady bar",
            "steady met",
        ),
        [
            [
                titles_of(row["subject"], row["peer"], row["model"]),
                row["model"],
                f"{row['overall_peak']:.3f}",
                f"{row['steps_peak']:.3f}",
                "yes" if row["met"] else "no",
                f"{row['steady']:.3f}",
                "" if row["steady_bar"] is None else f"≤ {row['steady_bar']:.2f}",
                {None: "", True: "yes", False: "no"}[row["steady_met"]],
            ]
            for row in rows
        ],
    )


def missed_memory(rows: list[dict[str, Any]]) -> list[str]:
    """Comparisons with a peak that is not below the peer's, and those that miss the bar of steady bytes."""
    missed = [f"{row['model']}, {row['subject']} / {row['peer']}: peak" for row in rows if not row["met"]]
    return missed + [
        f"{row['model']}, {row['subject']} / {row['peer']}: steady {row['steady']:.3f}, "
        f"at most {row['steady_bar']:g} expected"
        for row in rows
        if row["steady_met"] is False
    ]


def main(
    models: Annotated[str, typer.Option(help="Comma-separated shapes: tiny, 34m, 239m.")] = "34m,239m",
    steps: Annotated[int, typer.Option(min=2, help="Steps before and after the peak is reset.")] = 4,
    only: Annotated[str, typer.Option(help="Comma-separated contenders, e.g. stage3,fsdp2.")] = "",
    account_model: Annotated[str, typer.Option(help="Shape held against the formula; '' for none.")] = "34m",
) -> None:
    """Measure resident memory against peers and state bytes against the formula; write the result."""
    console = terminal()
    try:
        shapes = [shape_named(name) for name in models.split(",")]
        matches = select(MEMORY_MATCHES, [key for key in only.split(",") if key])
        account_shape = shape_named(account_model) if account_model else None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    keys = contenders_of(matches)
    compile_for(keys, console)
    with console.status("starting") as status:
        readings, failures = resident_readings(shapes, keys, steps, status.update)
        accounts: list[dict[str, Any]] = []
        if account_shape is not None:
            accounts, refused = measure_account(account_shape, steps, status.update)
            failures += refused
    rows = peak_rows(matches, readings)
    tables = [peak_table(rows), resident_table(readings), planned_table(accounts), account_table(accounts)]
    data: dict[str, Any] = {
        "environment": describe(),
        "peaks": rows,
        "resident": readings,
        "account": accounts,
        "account_bars": account_bars(accounts),
        "failures": failures,
    }
    missed = missed_memory(rows)
    missed += [f"state of a rank: {name}" for name, met in data["account_bars"].items() if not met]
    plot = partial(plot_state_bytes, accounts) if accounts else None
    conclude(console, "memory", "Memory of a rank", tables, data, [*failures, *missed], plot=plot)


if __name__ == "__main__":
    typer.run(main)
