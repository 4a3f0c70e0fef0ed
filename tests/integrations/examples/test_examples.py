"""Every example runs through in its short form; each checks its promises and ends with status 1 otherwise."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integrations.launch import ROOT, RUN, started

TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMPAT = [*RUN[1:], "--deepspeed-compat"]
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
    started(command, cwd=tmp_path)
