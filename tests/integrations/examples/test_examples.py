"""Every example runs through in its short form; each checks its promises and ends with status 1 otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMPAT = ["-m", "zero_ext.cli", "run", "--standalone", "--nproc-per-node", "2", "--deepspeed-compat"]
STARTS = {
    "trainer_llama": TWO_RANKS,
    "sft_lora_zero3": TWO_RANKS,
    "deepspeed_script": COMPAT,
    "lightning_gpt": [],
    "ray_train": [],
}


@pytest.mark.parametrize("name", STARTS)
def test_an_example_meets_its_promises(name: str, tmp_path: Path) -> None:
    command = [sys.executable, *STARTS[name], str(ROOT / "examples" / f"{name}.py"), "--ci"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
