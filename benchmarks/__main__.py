"""All registered runs one after the other, and what is recorded of them.

Run from the repository root: python -m benchmarks run [--quick] [NAME...], python -m benchmarks results
"""

import subprocess
from typing import Annotated

import typer

from benchmarks.harness.environment import changed_files
from benchmarks.harness.recorded import recorded_result, recorded_results
from benchmarks.harness.registered import ROOT, Run
from benchmarks.harness.report import RESULTS, Table, terminal
from benchmarks.runs import RUNS

# A run that hangs is ended. Without bf16 instructions, products of bf16 matrices take tens of times as long.
LIMIT_RATIO = 10  # over the estimate
SPARE_MINUTES = 10

app = typer.Typer(add_completion=False, help=__doc__)


def is_fresh(run: Run) -> bool:
    """Whether the run has a result of the code as it is."""
    result = recorded_result(run, RESULTS)
    return result is not None and not result.why_outdated()


def minutes_of(run: Run) -> float:
    """What a run took when it was last recorded, or its estimate."""
    result = recorded_result(run, RESULTS)
    return run.minutes if result is None or result.minutes is None else result.minutes


def duration(minutes: float) -> str:
    """Minutes in words."""
    hours, rest = divmod(max(1, round(minutes)), 60)
    return f"{hours} h {rest} min" if hours else f"{rest} min"


def measure(run: Run) -> str:
    """Run it to its end, and return how that ended."""
    limit = LIMIT_RATIO * run.minutes + SPARE_MINUTES
    try:
        status = subprocess.run(run.process, cwd=ROOT, check=False, timeout=60 * limit).returncode
    except subprocess.TimeoutExpired:
        return f"ended after {duration(limit)}, {run.command} has no limit"
    result = recorded_result(run, RESULTS)
    if result is None or not is_fresh(run):
        return f"not recorded, exit status {status}"
    return "recorded, all bars met" if status == 0 else f"recorded, {result.met}"


@app.command("run")
def run_all(
    names: Annotated[list[str] | None, typer.Argument(help="Registered runs; all by default.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Those of about ten minutes altogether.")] = False,
) -> None:
    """Run what has no fresh result. Call it again to continue after an interruption."""
    console = terminal()
    unknown = set(names or ()) - {run.name for run in RUNS}
    if unknown:
        raise typer.BadParameter(
            f"runs: expected names of benchmarks/runs.py, got {', '.join(sorted(unknown))}."
        )
    if changed := changed_files():
        raise typer.BadParameter(
            f"working tree: expected no changes, got {len(changed)} ({changed[0]}). Commit them first, "
            "because results of a tree with changes are not recorded."
        )
    chosen = [run for run in RUNS if (run.name in names if names else run.quick or not quick)]
    waiting = [run for run in chosen if not is_fresh(run)]
    console.print(f"{len(chosen) - len(waiting)} of {len(chosen)} results are fresh")
    table = Table("Runs", ("run", "outcome"))
    for number, run in enumerate(waiting):
        left = duration(sum(map(minutes_of, waiting[number:])))
        console.rule(
            f"{number + 1} of {len(waiting)}: {run.name}, about {duration(minutes_of(run))}, {left} left"
        )
        table.rows.append((run.name, measure(run)))
    if table.rows:
        table.show(console)
    if any(outcome != "recorded, all bars met" for _, outcome in table.rows):
        raise typer.Exit(1)


@app.command("results")
def list_results() -> None:
    """List every result: its commit, its age, whether it is outdated, and whether its bars were met."""
    console = terminal()
    table = Table("Results", ("result", "commit", "age", "outdated", "bars met"))
    results = recorded_results(RUNS, RESULTS)
    for each in results:
        table.rows.append((each.name, each.commit, each.age, each.why_outdated() or "no", each.met))
    recorded = {each.name for each in results}
    table.rows += [(run.name, "", "", "not measured", "") for run in RUNS if run.name not in recorded]
    table.show(console)


if __name__ == "__main__":
    app()
