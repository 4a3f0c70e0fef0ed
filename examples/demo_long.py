"""Train with sparse attention on windows of 16,384 bytes, under a memory cap that dense attention exceeds.

`python examples/demo_long.py [FOLDER]` takes under five minutes on two cores. It exits with status 1 if a
check fails. Under the same cap, attention that materializes the attention matrix must run out of memory.
Sparse attention must train and reach a held-out loss below that of byte frequencies. The report with plots of
the layouts is written to FOLDER (default: runs/demo-long-report) and replaces the report of an earlier run.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from demo.corpus import gather_corpus, unigram_entropy
from demo.folder import SETTINGS_FILE, clear, write_settings
from demo.record import read_records
from demo_long.processes import Ending, run
from demo_long.report import HEADINGS, TITLES, Result, failures, rows, write_report
from demo_long.settings import LongSettings
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from zero_ext.monitor import capped

DEFAULT_FOLDER = Path("runs") / "demo-long-report"
MEGA = 1e6


def demonstrate(folder: Path, settings: LongSettings, console: Console) -> int:
    """Run all parts, write the report and return the exit status."""
    began = time.perf_counter()
    clear(folder, SETTINGS_FILE)
    write_settings(settings, folder)
    try:
        result = _run_all(folder, settings, console)
    except (subprocess.TimeoutExpired, RuntimeError) as error:
        console.print(f"FAILED: {error}", markup=False)
        return 1
    console.print(_table(result))
    broken = failures(result, settings)
    page = write_report(folder, result, settings, broken, time.perf_counter() - began)
    for failure in broken:
        console.print(f"FAILED: {failure}", markup=False)
    seconds = time.perf_counter() - began
    console.print(f"{'FAILED' if broken else 'passed'} in {seconds:.0f} s, report: {page}", markup=False)
    return 1 if broken else 0


def _run_all(folder: Path, settings: LongSettings, console: Console) -> Result:
    corpus = gather_corpus()
    corpus.write(folder)
    base = run("base", folder, settings)
    if not base.trained:
        raise RuntimeError(f"the baseline run of a tiny model failed: {' / '.join(base.last_words)}")
    (record,) = read_records(folder, "base")
    endings: dict[str, Ending] = {}
    with capped(
        lambda watched: record["data_bytes" if watched == "data" else "peak_bytes"] + settings.cap_bytes
    ) as cap:
        of_base = record["data_bytes" if cap.watched == "data" else "peak_bytes"]
        console.print(
            f"windows of {settings.window:,} bytes under a cap of {cap.nbytes / MEGA:,.0f} MB ({cap.name}), "
            f"including {of_base / MEGA:,.0f} MB for the interpreter and its libraries",
            highlight=False,
        )
        for name, title in TITLES.items():
            console.rule(title)
            endings[name] = run(name, folder, settings, cap)
            for line in endings[name].last_words:
                console.print(f"  {line}", markup=False, highlight=False)
            console.print(f"  → {endings[name]}", markup=False)
        facts = (cap.nbytes, cap.name, of_base)
    records = {name: _record(folder, name) for name in TITLES}
    return Result(facts, endings, records, unigram_entropy(corpus.held_out))


def _record(folder: Path, name: str) -> dict[str, Any] | None:
    try:
        return read_records(folder, name)[0]
    except FileNotFoundError:
        return None


def _table(result: Result) -> Table:
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in rows(result):
        table.add_row(*row)
    return table


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER
    sys.exit(demonstrate(where, LongSettings(), Console(highlight=False)))
