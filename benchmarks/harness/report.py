"""Tables and files of a benchmark: the same rows on the terminal, in Markdown and in JSON."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table as RichTable

PIPE_WIDTH = 170
RESULTS = Path(__file__).resolve().parents[1] / "results"


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
    """A console; one that writes to a file or pipe gets lines wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def write_results(
    name: str, heading: str, tables: Sequence[Table], data: dict[str, Any], directory: Path = RESULTS
) -> tuple[Path, Path]:
    """Write `name`.json and `name`.md; `data["environment"]` heads the Markdown. Returns both paths."""
    directory.mkdir(parents=True, exist_ok=True)
    as_json, as_markdown = directory / f"{name}.json", directory / f"{name}.md"
    as_json.write_text(json.dumps(data, indent=1) + "\n")
    origin = "\n".join(f"- {key}: {value}" for key, value in data["environment"].items())
    body = "\n".join(table.markdown() for table in tables)
    as_markdown.write_text(f"# {heading}\n\n{body}\n## Where and how\n\n{origin}\n")
    return as_json, as_markdown


def conclude(
    console: Console,
    name: str,
    heading: str,
    tables: Sequence[Table],
    data: dict[str, Any],
    failures: Sequence[str] = (),
) -> None:
    """The end of a benchmark: shows the tables that have rows and writes them with `data`, if there are any;
    names the failures, and ends the program with status 1 if there are any."""
    tables = [table for table in tables if table.rows]
    for table in tables:
        table.show(console)
    if tables:
        for path in write_results(name, heading, tables, data):
            console.print(f"wrote {path}")
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    if failures:
        raise typer.Exit(1)


def megabytes(count: float) -> str:
    """Bytes as MB (10^6), for tables."""
    return f"{count / 1e6:,.0f}"
