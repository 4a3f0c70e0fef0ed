"""What Nsight Compute counts of the kernels that benchmarks.gpu.launches runs, as a table.

python -m scripts.gpu_check.counters
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.gpu_check.steps import find_program

# ncu's metric by the column of the table.
METRICS = {
    "µs": "gpu__time_duration.sum",
    "DRAM, % of peak": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "GB read": "dram__bytes_read.sum",
    "GB written": "dram__bytes_write.sum",
    "SM, % of peak": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps active, %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
}
# From ncu's base units, nanoseconds and bytes.
SCALES = {"µs": 1e-3, "GB read": 1e-9, "GB written": 1e-9}
NOTE = (
    "A launch each at full size, caches flushed, the clocks as found; kernels in the order of their launch."
)
KERNEL = "Kernel Name"
LONGEST_NAME = 70


def rows_of(text: str) -> list[list[str]]:
    """The table's rows from ncu's raw page in CSV: a header, a line of units, a line a launch.

    Raises:
        ValueError: the text has no such header.
    """
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if KERNEL in line and "," in line), None)
    if start is None:
        raise ValueError(f"ncu's answer: expected a line of CSV with {KERNEL!r}, got none. See the log.")
    header, _, *launches = csv.reader(lines[start:])
    absent = [metric for metric in METRICS.values() if metric not in header]
    if absent:
        raise ValueError(f"ncu's answer: expected the metrics asked for, got none of {', '.join(absent)}.")
    rows = []
    for launch in launches:
        found = dict(zip(header, launch, strict=True))
        values = [_shown(name, found[metric]) for name, metric in METRICS.items()]
        rows.append([found[KERNEL][:LONGEST_NAME], *values])
    return rows


def _shown(name: str, text: str) -> str:
    try:
        return f"{float(text.replace(',', '')) * SCALES.get(name, 1.0):.4g}"
    except ValueError:
        return text


def command(log: Path, more: Sequence[str] = ()) -> list[str]:
    """The call of ncu, which writes its page to `log`."""
    return [
        find_program("ncu"),
        *("--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off"),
        *("--clock-control", "none", "--log-file", str(log), "--metrics", ",".join(METRICS.values())),
        *(sys.executable, "-m", "benchmarks.gpu.launches", *more),
    ]


def main() -> int:
    """Exit status 1 if ncu failed or said nothing that can be read."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        done = subprocess.run(command(log), check=False)
        text = log.read_text(errors="replace") if log.is_file() else ""
    print(text, file=sys.stderr)
    try:
        rows = rows_of(text)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    title = "Kernels under Nsight Compute"
    columns = ["kernel", *METRICS]
    table = {"title": title, "columns": columns, "rows": rows, "note": NOTE}
    print(json.dumps({"tables": [table], "line": f"{len(rows)} launches"}))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
