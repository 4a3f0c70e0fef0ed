"""A simulated rank in a process of its own, as torch has one default group in a process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.harness.ranks import REPOSITORY

TIMEOUT_SECONDS = 300.0


def simulated(program: str, what: str, **request: Any) -> dict[str, Any]:
    """What `program`, a module of this folder, says of `request`: its last line, a JSON object.

    RuntimeError with `what` and the program's last words if it fails, TimeoutExpired after five minutes.
    """
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.harness.{program}", json.dumps(request)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_SECONDS,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{what} failed (exit {done.returncode}):\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
