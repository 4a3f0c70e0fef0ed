"""Scripts with Accelerate that know nothing of zero_ext train sharded, as they do without it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integrations.launch import ROOT, RUN, found_in, started
from tests.zero.training import distance

SCRIPT = ROOT / "tests" / "integrations" / "accelerate" / "unmodified_script.py"


def test_a_script_trains_as_under_ddp(tmp_path: Path) -> None:
    config = tmp_path / "zero.json"
    config.write_text(json.dumps({"stage": 3, "offload": {"optimizer": "host"}}))
    found = {}
    for name, options in {"plain": [], "sharded": ["--config", config]}.items():
        (tmp_path / name).mkdir()
        started([*RUN, *options, SCRIPT, tmp_path / name])
        found[name] = found_in(tmp_path / name)
    plain, sharded = found["plain"], found["sharded"]
    assert plain["stage"] is None and sharded["stage"] == 3
    assert plain["ranks"] == sharded["ranks"] == 2
    assert len(plain["losses"]) == 12
    assert sharded["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    weights = [
        {key: torch.tensor(value).double() for key, value in each["weights"].items()}
        for each in (sharded, plain)
    ]
    assert distance(*weights) < 1e-5


SUBCLASS = """
import accelerate
from zero_ext.integrations.shard_accelerators import shard_all_accelerators
shard_all_accelerators()
shard_all_accelerators()
class Own(accelerate.Accelerator):
    pass
print(type(accelerate.Accelerator(cpu=True)).__name__)
Own(cpu=True)
"""


def test_a_class_of_the_script_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SUBCLASS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "ZeroAccelerator\n" and done.returncode == 1
    assert "TypeError: Own: expected accelerate's own Accelerator, got a subclass" in done.stderr
