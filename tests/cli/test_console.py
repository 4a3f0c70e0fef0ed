"""What all commands share, seen from a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("options", [("--json",), ()])
def test_a_reader_that_has_had_enough_is_no_error(options: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "zero_ext.cli", "plan", "7.5B", "--gpus", "64", *options]
    try:
        done = subprocess.run(
            command, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=300, check=False
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
