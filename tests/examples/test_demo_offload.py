"""The demonstration of the tiers: its count of memory, its judgement, and one tiny run."""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MIB = 2**20
LOSSES = [5.5, 5.25, 5.0]
TINY = {"hidden_size": 32, "layers": 2, "feed_forward_size": 64, "heads": 2, "steps": 3}


@pytest.fixture(scope="module")
def demo() -> Iterator[Any]:
    """Imports the parts of the demonstration as `demo_offload.<part>`."""
    sys.path.insert(0, str(EXAMPLES))

    class DemoModules:
        def __getattr__(self, name: str) -> ModuleType:
            return importlib.import_module(f"demo_offload.{name}")

    yield DemoModules()
    sys.path.remove(str(EXAMPLES))


def test_the_line_a_killed_run_was_writing_does_not_count(demo: Any, tmp_path: Path) -> None:
    path = tmp_path / "timeline.csv"
    with demo.timeline.Recorder(path, tmp_path, 0.01) as recorder:
        recorder.step, recorder.device, recorder.host = 2, 30, 4
    samples = demo.timeline.read_timeline(path)
    assert (samples[-1].step, samples[-1].device, samples[-1].host) == (2, 30, 4)
    assert samples[-1].resident > MIB and samples[-1].data > MIB
    text = path.read_text()
    for cut in (1, 3, random.randrange(4, 12)):
        path.write_text(text[:-cut])
        assert demo.timeline.read_timeline(path) == samples[:-1]


def test_the_settings_count_the_models_parameters(demo: Any, tmp_path: Path) -> None:
    for settings in (demo.settings.OffloadSettings(), demo.settings.OffloadSettings(**TINY)):
        with torch.device("meta"):
            model = demo.train.build_model(settings, torch.bfloat16)
        assert sum(parameter.numel() for parameter in model.parameters()) == settings.parameters
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert torch.get_default_dtype() == torch.float32
        importlib.import_module("demo.folder").write_settings(settings, tmp_path)
        assert (
            importlib.import_module("demo.folder").read_settings(demo.settings.OffloadSettings, tmp_path)
            == settings
        )


def result(demo: Any, **changes: Any) -> Any:
    """All runs of a demonstration in which everything held, but for `changes`."""
    sample = demo.timeline.Sample(1.0, 1, 9 * MIB, 9 * MIB, 3 * MIB, 2 * MIB, 7 * MIB)
    status = {"plain": -9, "nvme": 0, "memory": 0, **changes.get("status", {})}
    kills = changes.get("kills", 1)
    endings = {
        run: demo.processes.Ending(code, kills, ["said"], [sample, sample]) for run, code in status.items()
    }
    record = {"losses": LOSSES, "seconds": [1.0, 2.0, 3.0], "moved": {"nvme → host": 1200}}
    records = {"plain": None, "memory": record, "nvme": {**record, **changes.get("nvme", {})}}
    return demo.verdict.Result(100, 8 * MIB, "a cap", "resident", endings, records)


def test_a_run_that_held_its_promises_passes_and_gets_its_report(demo: Any, tmp_path: Path) -> None:
    held, settings = result(demo), demo.settings.OffloadSettings(**TINY)
    assert demo.verdict.failures(held, settings, []) == []
    refused = result(demo, status={"plain": demo.train.OUT_OF_MEMORY}, kills=0)
    assert demo.verdict.failures(refused, settings, []) == []
    page = demo.report.write_report(tmp_path, held, settings, [], 1.0).with_suffix(".md").read_text()
    assert "All checks passed" in page and "| 3 | 5.0 | 5.0 | yes |" in page
    assert "| nvme → host | 1,200 | 12.000 |" in page and "exit status -9" in page
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG") and "timeline.png" in page


@pytest.mark.parametrize(
    ("changes", "left_behind", "said"),
    [
        ({"status": {"plain": 0}}, [], "PyTorch alone trained under the cap"),
        ({"status": {"plain": 1}}, [], "another reason than memory"),
        ({"kills": 0}, [], "another reason than memory"),
        ({"status": {"nvme": -9}}, [], "did not train (out of memory): status -9, said"),
        ({"status": {"memory": 1}}, [], "did not train (failed, status 1)"),
        ({"nvme": {"losses": LOSSES[:2]}}, [], "expected 3 steps, got 2"),
        ({"nvme": {"losses": [*LOSSES[:2], 5.0 + 1e-15]}}, [], "losses on NVMe: expected those in memory"),
        ({"nvme": {"losses": [*LOSSES[:2], float("nan")]}}, [], "losses on NVMe: expected those in memory"),
        ({}, ["extents.bin"], "still holds extents.bin"),
    ],
)
def test_a_broken_promise_fails(
    demo: Any, changes: dict[str, Any], left_behind: list[str], said: str
) -> None:
    settings = demo.settings.OffloadSettings(**TINY)
    found = demo.verdict.failures(result(demo, **changes), settings, left_behind)
    assert any(said in failure for failure in found), found


def test_a_tiny_model_trains_on_nvme_and_leaves_nothing_there(demo: Any, tmp_path: Path) -> None:
    settings = demo.settings.OffloadSettings(**TINY, staging_buffer_bytes=MIB, sample_seconds=0.005)
    folder, nvme = tmp_path / "report", tmp_path / "nvme"
    folder.mkdir()
    nvme.mkdir()
    importlib.import_module("demo.folder").write_settings(settings, folder)
    ending = demo.processes.run("nvme", folder, settings, nvme)
    assert ending.trained, ending.last_words
    record = json.loads((folder / "nvme-rank0.json").read_text())
    assert len(record["losses"]) == settings.steps and record["tiers"]["optimizer"] == "nvme"
    assert record["moved"]["nvme → host"] >= 12 * settings.parameters
    assert max(sample.nvme for sample in ending.timeline) >= 14 * settings.parameters
    assert ending.timeline[-1].host >= MIB + 2 * settings.parameters
    assert ending.timeline[-1].step == settings.steps and not list(nvme.iterdir())


def test_a_run_past_its_time_limit_is_ended(demo: Any, tmp_path: Path) -> None:
    settings = demo.settings.OffloadSettings(**TINY, time_limit_seconds=0.2)
    importlib.import_module("demo.folder").write_settings(settings, tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        demo.processes.run("plain", tmp_path, settings)
    assert not (tmp_path / "plain-rank0.json").exists()
