"""Count the work of all hot paths, in two processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.work_counts.counting import Counts
from scripts.work_counts.rank import RANKS

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 500.0
# Settings of the caller that change what zero_ext and torch do.
FOREIGN = ("ZERO_EXT_", "TORCH_", "RANK", "WORLD_SIZE", "LOCAL_", "ACCELERATE_", "DS_")


def environment() -> dict[str, str]:
    """The caller's variables without settings, and with one order of sets in all processes."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    search = os.pathsep.join(filter(None, (str(ROOT), own.get("PYTHONPATH"))))
    return own | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": search}


def measured_counts() -> dict[str, Counts]:
    """Work of each hot path by unit, of rank 0.

    Raises:
        RuntimeError: a rank failed, or two counts of the same work differ.
        TimeoutError: the ranks have not ended in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = _run_ranks(Path(folder))
    first, second = json.loads(output.splitlines()[-1])
    if first != second:
        differing = {name: (first[name], second[name]) for name in first if first[name] != second[name]}
        raise RuntimeError(f"counts of two steps in a row: expected equal ones, got {differing}.")
    return first


def _run_ranks(folder: Path) -> str:
    """Standard output of rank 0. The failure of one rank ends the other, which would wait for it."""
    logs = [folder / f"log-{rank}" for rank in range(RANKS)]
    output = folder / "output"
    processes: list[subprocess.Popen[bytes]] = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-m", "scripts.work_counts.rank", str(rank), str(folder)]
        with log.open("wb") as errors, output.open("wb") if rank == 0 else log.open("ab") as said:
            process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=said, stderr=errors)
        processes.append(process)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    try:
        while any(each.poll() is None for each in processes) and not any(
            each.returncode for each in processes
        ):
            if time.monotonic() > deadline:
                raise TimeoutError(f"scripts.work_counts.rank: expected an end in {TIMEOUT_SECONDS:g} s.")
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        said_last = "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)
        raise RuntimeError(f"scripts.work_counts.rank failed:\n{said_last}")
    return output.read_text()
