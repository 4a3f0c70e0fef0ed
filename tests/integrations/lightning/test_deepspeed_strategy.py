"""A script of Lightning's DeepSpeedStrategy under the installed DeepSpeed and under the look-alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "deepspeed_strategy.py"
REAL = Path(__file__).parents[1] / "deepspeed" / "scripts" / "real.py"
ROOT = Path(__file__).parents[3]
SECONDS = 600


def found_under(wanted: str, folder: Path) -> dict[str, Any]:
    """What the script found on two ranks; ``wanted`` says which DeepSpeed it was to import."""
    folder.mkdir()
    under = [REAL] if wanted == "real" else ["--deepspeed-compat"]
    run = [sys.executable, "-m", "zero_ext.cli", "run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*run, *map(str, [*under, SCRIPT, folder])],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    path = "site-packages/deepspeed/" if wanted == "real" else "zero_ext/integrations/deepspeed/"
    assert path in found.pop("file")
    return found


def test_fit_test_fit_and_fabric_are_those_of_deepspeed(tmp_path: Path) -> None:
    real, ours = (found_under(name, tmp_path / name) for name in ("real", "ours"))
    assert ours.keys() == real.keys() == {"trainer-2", "trainer-3", "fabric-2", "fabric-3"}
    for case, theirs in real.items():
        assert ours[case].keys() == theirs.keys()
        for key, values in theirs.items():
            assert ours[case][key] == pytest.approx(values, rel=1e-5), (case, key)
