"""Train on two simulated nodes with compressed communication, and compare with uncompressed training.

`python examples/demo_compressed.py [FOLDER]` takes under five minutes on two cores. It exits with status 1 if
a check fails. 1-bit Adam, 0/1 Adam and ZeRO++ must reach the held-out loss of Adam and ZeRO-3 within a
tolerance, with a fraction of the traffic between nodes. The report with loss curves and bytes per step is
written to FOLDER (default: runs/demo-compressed-report) and replaces the report of an earlier run.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from demo.corpus import gather_corpus, unigram_entropy
from demo.folder import SETTINGS_FILE, clear, write_settings
from demo.launch import launch
from demo_compressed.modes import MODES
from demo_compressed.outcome import Outcome, failures
from demo_compressed.report import HEADINGS, rows, write_report
from demo_compressed.settings import CompressedSettings
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

DEFAULT_FOLDER = Path("runs") / "demo-compressed-report"


def demonstrate(folder: Path, settings: CompressedSettings, console: Console) -> int:
    """Train in all modes, write the report and return the exit status."""
    began = time.perf_counter()
    clear(folder, SETTINGS_FILE)
    write_settings(settings, folder)
    corpus = gather_corpus()
    corpus.write(folder)
    nodes = settings.ranks // settings.ranks_per_node
    console.rule(f"{settings.ranks} ranks on {nodes} simulated nodes, {settings.steps} steps per mode")
    try:
        launch("demo_compressed.train", settings.ranks, folder)
    except subprocess.CalledProcessError as error:
        console.print(f"FAILED: training ended with status {error.returncode}", markup=False)
        return 1
    outcomes = {name: Outcome.read(folder, name) for name in MODES}
    unigram = unigram_entropy(corpus.held_out)
    broken = failures(outcomes, unigram, settings)
    console.print(_table(rows(outcomes, broken, settings)))
    seconds = time.perf_counter() - began
    page = write_report(folder, outcomes, unigram, settings, broken, seconds)
    for name, lines in broken.items():
        for line in lines:
            console.print(f"FAILED: {MODES[name].title}: {line}", markup=False)
    failed = any(broken.values())
    console.print(f"{'FAILED' if failed else 'passed'} in {seconds:.0f} s, report: {page}", markup=False)
    return int(failed)


def _table(cells: list[list[str]]) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        caption="kB/step: sent between nodes per step. Reduction: uncompressed bytes per compressed byte",
    )
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if number else "left")
    for row in cells:
        table.add_row(*row)
    return table


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER
    sys.exit(demonstrate(where, CompressedSettings(), Console(highlight=False)))
