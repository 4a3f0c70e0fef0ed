"""Every Python block of the how-to runs, in order, as a reader would type it; the example script as well."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_ext

ROOT = Path(__file__).resolve().parents[2]


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dataset = [torch.full((4,), float(index)) for index in range(10)]
    names: dict[str, Any] = {"build_model": build_model, "loader": [torch.randn(3, 4) for _ in range(4)]}
    results, epochs = [], []
    for block in blocks("how_to/plain_loop.md"):
        if "gradient_clipping" in block:  # a new section begins with a model of its own
            names["model"] = build_model()
            names["optimizer"] = torch.optim.AdamW(names["model"].parameters(), lr=1e-3)
        names.setdefault("dataset", dataset)
        if "scheduler" in block:
            names["scheduler"] = torch.optim.lr_scheduler.StepLR(names["optimizer"], 3)
        exec(compile(block, "docs/how_to/plain_loop.md", "exec"), names)
        results.append(dict(names))
        epochs.append(getattr(names["loader"], "epoch", None))
    assert len(results) == 7
    before, after = (result["loss"] for result in results[:2])
    torch.testing.assert_close(after, before, rtol=1e-6, atol=0)
    assert epochs[2] == 2
    assert (tmp_path / "checkpoints" / "latest").exists()
    assert (tmp_path / "runs" / "steps.csv").exists()


def test_the_edit_on_the_page_halves_the_first_weight() -> None:
    model, _ = zero_ext.prepare(build_model(), None, {"stage": 3})
    names = {"zero_ext": zero_ext, "torch": torch, "model": model}
    names["engine"] = zero_ext.zero.engine_of(model)
    (block,) = (block for block in blocks("how_to/plain_loop.md") if "modifier_rank" in block)
    exec(block, names)
    first = build_model()[0].weight
    assert torch.equal(zero_ext.full_state_dict(model)["0.weight"], names["full"]["0.weight"] / 2)
    assert torch.equal(names["full"]["0.weight"], first)
    assert names["largest"] == max(parameter.abs().max().item() for parameter in build_model().parameters())


def test_the_script_trains_on_two_ranks_and_resumes_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(ROOT / "examples" / "plain_loop.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    runpy.run_path(script, run_name="__main__")
    printed = re.findall(r"step (\d+): loss ([\d.]+)", done.stdout + capsys.readouterr().out)
    assert [int(step) for step, _ in printed] == [50, 100, 150, 200, 250, 300, 350, 400]
    losses = [float(loss) for _, loss in printed]
    assert losses[-1] < losses[3] < losses[0]
