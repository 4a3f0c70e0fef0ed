"""Tables and files of a benchmark: the same rows on the terminal, in Markdown and in JSON."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.harness.environment import DIRTY, RESULTS_FOLDER, UNKNOWN, commit, start
from benchmarks.harness.recorded import recorded_result
from benchmarks.harness.registered import ROOT, Run, run_of_command
from benchmarks.runs import RUNS

PIPE_WIDTH = 170
RESULTS = ROOT / RESULTS_FOLDER
TRIALS = ROOT / "build" / "benchmarks"
REPEATS = "measurements at this commit"


@dataclass
class Table:
    """A titled table of strings; the first column is text, the others are figures."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    note: str = ""

    def markdown(self) -> str:
        """GitHub Markdown: heading, table, note."""
        rule = ["---"] + ["---:"] * (len(self.columns) - 1)
        lines = [self.columns, rule, *self.rows]
        text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"## {self.title}\n\n{text}\n" + (f"\n{self.note}\n" if self.note else "")

    def show(self, console: Console) -> None:
        """Print to the terminal."""
        table = RichTable(title=self.title, caption=self.note or None, title_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)


def terminal() -> Console:
    """Note the start of the benchmark and return its console. One that writes to a file or a pipe has lines
    wide enough for the tables."""
    start()
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def write_results(
    name: str, heading: str, tables: Sequence[Table], data: dict[str, Any], directory: Path
) -> list[Path]:
    """Write `name`.json and `name`.md; `data["environment"]` heads the Markdown. Returns both paths."""
    as_json, as_markdown = directory / f"{name}.json", directory / f"{name}.md"
    as_json.parent.mkdir(parents=True, exist_ok=True)
    as_json.write_text(json.dumps(data, indent=1) + "\n")
    origin = "\n".join(f"- {key}: {value}" for key, value in data["environment"].items())
    body = "\n".join(table.markdown() for table in tables)
    as_markdown.write_text(f"# {heading}\n\n{body}\n## Where and how\n\n{origin}\n")
    return [as_json, as_markdown]


def why_not_recorded(run: Run | None, complete: bool) -> str:
    """Why the run that ends is a trial; empty if it is recorded."""
    begun, ended = start().commit, commit()
    if run is None:
        return "its options are not those of a run in benchmarks/runs.py"
    if not complete:
        return "it is not finished"
    if begun == UNKNOWN:
        return "git does not name the commit"
    if begun.endswith(DIRTY):
        return f"the working tree had changes or untracked files at its start ({begun})"
    if begun != ended:
        return f"the working tree changed meanwhile, from {begun} to {ended}"
    return ""


def measurements(run: Run, at: str) -> int:
    """How often the run was recorded at the commit `at`, now included: a repeat until bars are met shows."""
    before = recorded_result(run, RESULTS)
    return 1 + (int(before.data["environment"].get(REPEATS, 1)) if before and before.commit == at else 0)


def conclude(
    console: Console,
    name: str,
    heading: str,
    tables: Sequence[Table],
    data: dict[str, Any],
    failures: Sequence[str] = (),
    *,
    plot: Callable[[Path], Path] | None = None,
    complete: bool = True,
) -> None:
    """The end of a benchmark: show the tables that have rows and write them with `data`, if there are any.

    A registered run from a tree without changes is recorded in RESULTS, whether its bars are met or not.
    Any other run is a trial, and its files are `name` in TRIALS.

    Args:
        console: what `terminal` returned.
        name: of a trial's files.
        heading: of the Markdown.
        tables: of the terminal and the Markdown.
        data: of the JSON; "environment" has what `describe` returned.
        failures: missed bars and contenders that failed, recorded as "missed".
        plot: draws to the path of a PNG, and returns it.
        complete: False for a run that is continued by another call.

    Raises:
        typer.Exit: with status 1, if there are failures.
    """
    tables = [table for table in tables if table.rows]
    for table in tables:
        table.show(console)
    if tables:
        run = run_of_command(RUNS, sys.argv)
        reason = why_not_recorded(run, complete)
        folder, name = (RESULTS, run.name) if run and not reason else (TRIALS, name)
        console.print(f"A trial, not recorded: {reason}." if reason else "Recorded.")
        data = data | {"missed": list(failures)}
        if run and not reason:
            data["environment"] |= {REPEATS: str(measurements(run, data["environment"]["commit"]))}
        for path in write_results(name, heading, tables, data, folder):
            console.print(f"wrote {path}")
        if plot is not None:
            console.print(f"wrote {plot(folder / f'{name}.png')}")
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    if failures:
        raise typer.Exit(1)


def megabytes(count: float) -> str:
    """Bytes as MB (10^6), for tables."""
    return f"{count / 1e6:,.0f}"
