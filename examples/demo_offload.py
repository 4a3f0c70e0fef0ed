"""Train a model with its state on NVMe, under a memory cap that PyTorch alone exceeds.

`python examples/demo_offload.py [FOLDER] [--nvme-path PATH]` takes under five minutes on two cores. It exits
with status 1 if a check fails. Under the same cap, PyTorch alone must run out of memory and zero_ext must
train. The losses must be bitwise equal to those of the same run in memory, and no file may remain on NVMe.
The report with its plot is written to FOLDER (default: runs/demo-offload-report) and replaces the report of
an earlier run.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from demo.folder import SETTINGS_FILE, clear, write_settings
from demo.record import read_records
from demo_offload.processes import Ending, run
from demo_offload.report import write_report
from demo_offload.settings import OffloadSettings
from demo_offload.verdict import HEADINGS, NAMES, Result, failures, megabytes, rows
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from zero_ext.monitor import capped

DEFAULT_FOLDER = Path("runs") / "demo-offload-report"
CAPTION = "peak MB. process: resident memory. device, host, NVMe: state and staging"


def demonstrate(folder: Path, nvme_path: Path, settings: OffloadSettings, console: Console) -> int:
    """Run all parts with a temporary folder below `nvme_path` and return the exit status."""
    began = time.perf_counter()
    clear(folder, SETTINGS_FILE)
    write_settings(settings, folder)
    nvme_path.mkdir(parents=True, exist_ok=True)
    nvme = Path(tempfile.mkdtemp(prefix="demo-offload-", dir=nvme_path))
    try:
        result = _run_all(folder, nvme, settings, console)
        left_behind = sorted(path.name for path in nvme.iterdir())
    except (subprocess.TimeoutExpired, RuntimeError) as error:
        console.print(f"FAILED: {error}", markup=False)
        return 1
    finally:
        shutil.rmtree(nvme)
    found = failures(result, settings, left_behind)
    console.print(_table(result))
    seconds = time.perf_counter() - began
    page = write_report(folder, result, settings, found, seconds)
    for failure in found:
        console.print(f"FAILED: {failure}", markup=False)
    console.print(f"{'FAILED' if found else 'passed'} in {seconds:.0f} s, report: {page}", markup=False)
    return 1 if found else 0


def _run_all(folder: Path, nvme: Path, settings: OffloadSettings, console: Console) -> Result:
    parameters = settings.parameters
    console.rule("memory of the interpreter and its libraries")
    base = run("base", folder, settings, nvme)
    if not base.trained:
        raise RuntimeError(f"the baseline run of a tiny model failed: {' / '.join(base.last_words)}")
    endings: dict[str, Ending] = {}
    watched = {
        column: max(getattr(sample, column) for sample in base.timeline) for column in ("resident", "data")
    }
    with capped(lambda column: watched[column] + settings.cap_bytes_per_parameter * parameters) as cap:
        console.print(
            f"{megabytes(watched[cap.watched])} MB. The cap for {parameters:,} parameters is "
            f"{megabytes(cap.nbytes)} MB ({cap.name})"
        )
        for name, title in (("plain", "PyTorch alone, capped"), ("nvme", "zero_ext with NVMe, capped")):
            console.rule(title)
            endings[name] = run(name, folder, settings, nvme if name == "nvme" else None, cap)
            _report(endings[name], console)
        facts = cap.nbytes, cap.name, cap.watched
    console.rule("zero_ext in memory, not capped")
    endings["memory"] = run("memory", folder, settings)
    _report(endings["memory"], console)
    return Result(parameters, *facts, endings, {name: _record(folder, name) for name in NAMES})


def _record(folder: Path, name: str) -> dict[str, Any] | None:
    try:
        return read_records(folder, name)[0]
    except FileNotFoundError:
        return None


def _report(ending: Ending, console: Console) -> None:
    for line in ending.last_words:
        console.print(f"  {line}", markup=False)
    console.print(f"  → {ending}", markup=False)


def _table(result: Result) -> Table:
    style = {"box": SIMPLE_HEAD, "collapse_padding": True, "pad_edge": False, "caption_justify": "left"}
    table = Table(caption=CAPTION, **style)
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in rows(result):
        table.add_row(*row)
    return table


def _terminated(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    """Read the command line, run the demonstration and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_FOLDER, help="folder of the report")
    parser.add_argument(
        "--nvme-path", type=Path, default=Path("runs"), help="folder on the NVMe device (default: runs)"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminated)
    console = Console(highlight=False)
    try:
        return demonstrate(arguments.folder, arguments.nvme_path.absolute(), OffloadSettings(), console)
    except KeyboardInterrupt:
        console.print("interrupted. The temporary NVMe folder was removed.")
        return 130


if __name__ == "__main__":
    sys.exit(main())
