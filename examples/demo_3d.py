"""Train one model with pipeline parallelism, tensor parallelism and ZeRO, in three layouts of four ranks.

`python examples/demo_3d.py [FOLDER]` takes under five minutes on two cores. It exits with status 1 if a check
fails. In every layout, each step's loss must match that of a single process. The report with the losses and
the timeline of one pipeline step is written to FOLDER (default: runs/demo-3d-report) and replaces the report
of an earlier run.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from demo.corpus import gather_corpus
from demo.folder import SETTINGS_FILE, clear, write_settings
from demo.launch import launch
from demo_3d.report import HEADINGS, Outcome, failures, rows, write_report
from demo_3d.settings import ALONE, LAYOUTS, ThreeDSettings
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

DEFAULT_FOLDER = Path("runs") / "demo-3d-report"


def demonstrate(folder: Path, settings: ThreeDSettings, console: Console) -> int:
    """Train in all layouts, write the report and return the exit status."""
    began = time.perf_counter()
    clear(folder, SETTINGS_FILE)
    write_settings(settings, folder)
    gather_corpus().write(folder)
    console.rule(f"{settings.ranks} ranks, {settings.steps} steps in each layout")
    try:
        launch("demo_3d.train", 1, folder)
        launch("demo_3d.train", settings.ranks, folder)
    except subprocess.CalledProcessError as error:
        console.print(f"FAILED: training ended with status {error.returncode}", markup=False)
        return 1
    outcomes = {name: Outcome.read(folder, name) for name in (ALONE, *LAYOUTS)}
    broken = failures(outcomes, settings)
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows(outcomes, broken):
        table.add_row(*row)
    console.print(table)
    seconds = time.perf_counter() - began
    page = write_report(folder, outcomes, settings, broken, seconds)
    for name, lines in broken.items():
        for line in lines:
            console.print(f"FAILED: {LAYOUTS[name].title}: {line}", markup=False)
    failed = any(broken.values())
    console.print(f"{'FAILED' if failed else 'passed'} in {seconds:.0f} s, report: {page}", markup=False)
    return int(failed)


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER
    sys.exit(demonstrate(where, ThreeDSettings(), Console(highlight=False)))
