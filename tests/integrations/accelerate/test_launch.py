"""A script under ``accelerate launch`` on two CPU ranks trains as one process does without either library."""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path

import pytest
import torch

from tests.integrations.accelerate.script import ACCUMULATION, BATCH, CLIP, build
from tests.integrations.launch import started
from tests.zero.models import language_loss
from tests.zero.training import distance

SCRIPT = Path(__file__).resolve().parent / "script.py"


def plain(seed: int, ranks: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses (means over the ranks), gradient norms and final weights of the same training by torch alone."""
    model, optimizer, schedule, ids = build(seed)
    losses, norms = [], []
    for _ in range(2):
        for number, batch in enumerate(ids.split(BATCH * ranks)):
            loss = language_loss(model, batch)
            (loss / ACCUMULATION).backward()
            losses.append(loss.item())
            if number % ACCUMULATION == ACCUMULATION - 1:
                norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return losses, norms, model.state_dict()


def test_a_launched_script_trains_as_one_process(tmp_path: Path) -> None:
    stage = 3
    seed = secrets.randbelow(1 << 30)
    print(f"seed {seed}")
    # Its way to several ranks on one machine, with or without GPUs; --cpu would start one.
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--main_process_port", "0"]
    launch += ["--num_cpu_threads_per_process", "1", "--dynamo_backend", "no"]
    done = started([*launch, SCRIPT, seed, stage, tmp_path], cwd=tmp_path)
    facts = json.loads((tmp_path / f"facts-{stage}.json").read_text())
    losses, norms, weights = plain(seed, 2)
    assert facts["ranks"] == 2 and len(losses) == 12
    assert facts["losses"] == pytest.approx(losses, rel=1e-5)
    assert facts["norms"] == pytest.approx(norms, rel=1e-4)
    assert min(norms) > CLIP
    found = torch.load(tmp_path / f"weights-{stage}.pt", weights_only=True)
    assert distance(found, weights) < 1e-4
    assert "DistributedDataParallel: expected a model that is not prepared" in done.stderr
