"""Scripts with Accelerate that know nothing of zero_ext train sharded, as they do without it."""

from __future__ import annotations

import json
import os
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


OTHER_USES = """
import json, sys
import accelerate, torch
from zero_ext.integrations.shard_accelerators import shard_all_accelerators
shard_all_accelerators()
shard_all_accelerators()
class Own(accelerate.Accelerator):
    pass
kind = {"own": Own, "auto": accelerate.Accelerator}[sys.argv[1]]
accelerator = kind(cpu=True)
loader = accelerator.prepare(torch.utils.data.DataLoader(range(4)))
print(json.dumps([type(accelerator).__name__, accelerator.is_main_process, len(loader)]))
accelerator.prepare(torch.nn.Linear(2, 2))
"""


@pytest.mark.parametrize(
    ("kind", "name", "reason"),
    [
        ("own", "Own", "TypeError: Own: expected accelerate's own Accelerator, got a subclass"),
        ("auto", "Accelerator", "optimizer.params.lr"),
    ],
)
def test_what_cannot_be_sharded_is_refused_with_a_model(
    tmp_path: Path, kind: str, name: str, reason: str
) -> None:
    """Before that it answers: scripts with a Trainer ask it for the rank."""
    config = tmp_path / "trainer.json"
    optimizer = {"type": "AdamW", "params": {"lr": "auto"}}
    config.write_text(json.dumps({"zero_optimization": {"stage": 3}, "optimizer": optimizer}))
    done = subprocess.run(
        [sys.executable, "-c", OTHER_USES, kind],
        cwd=ROOT,
        env={**os.environ, "ZERO_EXT_CONFIG": str(config)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == json.dumps([name, True, 4]) + "\n" and done.returncode == 1
    assert reason in done.stderr
