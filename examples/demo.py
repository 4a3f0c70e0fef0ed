"""Train a small language model on real text with ZeRO-3, and compare every stage with a plain loop.

`python examples/demo.py [FOLDER]` takes under four minutes on two cores. It exits with status 1 if a check
fails. Two ranks train and save, and a single rank resumes. The held-out loss must fall below the byte-unigram
entropy of the text and below 0.6 times its start. Then stages 0 to 3 and a plain loop run the same steps. The
report with its plots is written to FOLDER (default: runs/demo-report) and replaces the report of an earlier
run.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from demo.comparison import HEADINGS, Row, cells, compare
from demo.comparison import failures as comparison_failures
from demo.corpus import gather_corpus
from demo.folder import clear
from demo.launch import launch
from demo.report import summary, write_report
from demo.settings import SETTINGS
from demo.training_run import TrainingRun
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

CAPTION = "state: model state per rank, from the memory breakdown. sent: per rank and step. Both in MB"
DEFAULT_FOLDER = Path("runs") / "demo-report"


def main(folder: Path) -> int:
    """Run all parts and return the exit status."""
    began = time.perf_counter()
    console = Console(highlight=False)
    clear(folder, "training.txt")

    console.rule("gathering text")
    corpus = gather_corpus()
    corpus.write(folder)
    sizes = corpus.training.numel(), corpus.held_out.numel()
    console.print(f"{sizes[0]:,} bytes of Python's own documentation for training, {sizes[1]:,} held out")

    try:
        console.rule(f"training with ZeRO-3 on {SETTINGS.ranks} ranks")
        launch("demo.train", SETTINGS.ranks, folder, SETTINGS.save_at)
        console.rule("resuming on 1 rank")
        launch("demo.train", 1, folder, SETTINGS.steps, "sample")
        run = TrainingRun.read(folder)
        for line in summary(run):
            console.print(line)
        console.print("\na sample of generated text (not checked):", run.sample, sep="\n", markup=False)

        console.rule("the same steps with every stage")
        launch("demo.stages", SETTINGS.ranks, folder)
        launch("demo.plain", 1, folder)
    except subprocess.CalledProcessError as error:
        console.print(
            f"FAILED: {' '.join(map(str, error.cmd))} ended with status {error.returncode}", markup=False
        )
        return 1

    rows = compare(folder, run.parameters)
    console.print(_table(rows))

    failures = run.failures() + comparison_failures(rows)
    seconds = time.perf_counter() - began
    page = write_report(folder, run, rows, failures, seconds)
    for failure in failures:
        console.print(f"FAILED: {failure}", markup=False)
    console.print(f"{'FAILED' if failures else 'passed'} in {seconds:.0f} s, report: {page}", markup=False)
    return 1 if failures else 0


def _table(rows: list[Row]) -> Table:
    style = {"box": SIMPLE_HEAD, "collapse_padding": True, "pad_edge": False, "caption_justify": "left"}
    table = Table(caption=CAPTION, **style)
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row, rows[0]))
    return table


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER))
