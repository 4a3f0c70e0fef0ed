"""``zero-ext simulate``."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.command import run


def test_the_fastest_placements_are_listed() -> None:
    text = run("simulate", "gpt-1.2b", "--machine", "dgx2-v100", "--gpus", "16")
    assert "TFLOP/s" in text
    assert "device" in text


def test_a_configuration_is_simulated_and_what_does_not_fit_is_said(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"stage": 3, "offload": {"grads": "host", "optimizer": "host"}}))
    arguments = ("simulate", "gpt-10b", "--machine", "dgx2-v100", "--config", str(path))
    assert "host" in run(*arguments, "--gpus", "4")
    short = run(*arguments, "--gpus", "1", "--micro-batch", "1", "--no-recompute", status=1)
    assert "does not fit: device" in short


def test_what_fits_nowhere_says_how_much_is_missing() -> None:
    text = run("simulate", "gpt-2t", "--machine", "dgx-a100", "--gpus", "1", status=1)
    assert "fits no placement" in text
    assert "GB too few" in text


def test_published_runs_are_shown_with_their_error() -> None:
    text = run("simulate", "--published")
    assert "ZeRO-Offload, 10B, one V100" in text
    assert "fitted" in text
    assert "%" in text


def test_an_unknown_model_is_an_error() -> None:
    assert "llama-7b" in run("simulate", "no-such-model", status=2)
