"""Programs of the tests, started as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RUN = [sys.executable, "-m", "zero_ext.cli", "run", "--standalone", "--nproc-per-node", "2"]
# Runs a script under the DeepSpeed that is installed.
REAL = Path(__file__).parent / "deepspeed" / "scripts" / "real.py"
QUIET = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def started(
    command: Sequence[object], cwd: Path = ROOT, **environment: object
) -> subprocess.CompletedProcess[str]:
    """A program that has ended well."""
    extra = {name: str(value) for name, value in environment.items()}
    done = subprocess.run(
        [str(each) for each in command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **QUIET, **extra},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done


def found_in(folder: Path) -> dict[str, Any]:
    """What a script wrote to ``found.json``."""
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def printed_by(program: str, *arguments: str) -> Any:
    """The JSON that ``program`` prints last, in an interpreter of its own."""
    return json.loads(started([sys.executable, "-c", program, *arguments]).stdout.splitlines()[-1])
