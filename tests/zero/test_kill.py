"""SIGKILL amid steps with everything on NVMe: the next run goes on from the checkpoint, bit for bit."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("world_size", "kills"), [(1, 3), (2, 2)])
def test_a_killed_run_resumes_bit_for_bit_and_leaves_nothing(
    tmp_path: Path, world_size: int, kills: int
) -> None:
    seed = secrets.randbits(20)
    print(f"seed {seed}")
    arguments = [
        sys.executable,
        "-m",
        "tests.zero.kill_loop",
        str(tmp_path),
        str(world_size),
        str(kills),
        str(seed),
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0 and done.stdout.startswith(f"killed {kills} times"), done.stdout + done.stderr
