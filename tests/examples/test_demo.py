"""The demonstration's own judgement: its text, its bars, and that broken promises make it fail."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PARAMETERS = 4096


@pytest.fixture(scope="module")
def demo() -> Iterator[Any]:
    """Imports the parts of the demonstration as `demo.<part>`."""
    sys.path.insert(0, str(EXAMPLES))

    class DemoModules:
        def __getattr__(self, name: str) -> ModuleType:
            return importlib.import_module(f"demo.{name}")

    yield DemoModules()
    sys.path.remove(str(EXAMPLES))


def write_library(folder: Path, names: list[str]) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = [f"Purpose of {name}.", "Said in every module.", f"Duty of {name}."]
        path.write_text(
            f'"""{texts[0]}"""\ndef f():\n "{texts[1]}"\nclass C:\n "{texts[2]}"\nx = "no text"\n'
        )


def test_the_text_is_the_same_every_time_and_held_out_text_is_unseen(demo: Any, tmp_path: Path) -> None:
    names = [f"part{number % 3}/module{number}.py" for number in range(60)]
    write_library(tmp_path / "one", names)
    write_library(tmp_path / "two", [*names[::-1], "test/test_it.py", "site-packages/other.py"])
    (tmp_path / "two" / "broken.py").write_text("def (")
    corpus, again = (demo.corpus.gather_corpus(tmp_path / name) for name in ("one", "two"))
    assert torch.equal(corpus.training, again.training) and torch.equal(corpus.held_out, again.held_out)
    training, held_out = (
        bytes(side.tolist()).split(b"\0")[:-1] for side in (corpus.training, corpus.held_out)
    )
    assert not set(training) & set(held_out)
    assert (
        len({*training, *held_out})
        == len(training) + len(held_out)
        == 121 + len(set(demo.corpus.topics.values()))
    )
    modules = [
        {name for name in names if f"Duty of {name}.".encode() in side} for side in (training, held_out)
    ]
    assert modules[0] | modules[1] == set(names) and not modules[0] & modules[1] and modules[1]
    for name in modules[1]:
        assert f"Purpose of {name}.".encode() in held_out
    corpus.write(tmp_path)
    assert torch.equal(demo.corpus.Corpus.read(tmp_path).training, corpus.training)


def test_unigram_entropy_is_the_entropy_of_byte_frequencies(demo: Any) -> None:
    text = torch.randint(0, 200, (5000,)).square().remainder(251).to(torch.uint8)
    shares = [count / 5000 for count in Counter(text.tolist()).values()]
    expected = -math.fsum(share * math.log(share) for share in shares)
    assert demo.corpus.unigram_entropy(text) == pytest.approx(expected, rel=1e-12)


def test_windows_cover_the_text_once(demo: Any) -> None:
    text = torch.arange(100, dtype=torch.uint8)
    windows = demo.corpus.ByteWindows(text, 8)
    assert torch.cat([windows[index]["labels"] for index in range(len(windows))]).tolist() == list(range(96))
    assert windows.spread(3)[:, 0].tolist() == [0, 32, 64]


def write_runs(folder: Path, settings: Any, changes: dict[str, Any]) -> None:
    """Records of a demonstration in which everything held, but for `changes` (run -> keys)."""
    first = {
        "parameters": PARAMETERS,
        "unigram_entropy": 3.2,
        "losses": [3.0] * settings.save_at,
        "held_out_before": 5.6,
        "held_out_after": 2.8,
        "sample": None,
    }
    second = {
        **first,
        "losses": [2.9] * (settings.steps - settings.save_at),
        "held_out_before": 2.8001,
        "held_out_after": 2.6,
        "sample": "text",
    }
    losses = [5.0, 4.0, 3.5]
    runs = {f"train-{settings.save_at}": (2, first), f"train-{settings.steps}": (1, second)}
    full = {"params": 2 * PARAMETERS, "grads": 2 * PARAMETERS, "optimizer": 12 * PARAMETERS}
    runs["plain"] = (1, {"losses": [loss * 1.0001 for loss in losses], "seconds": 0.5, "bytes": full})
    traffic = [("reduce_scatter", "gather_gradients"), ("reduce_scatter", "gather_updated")]
    traffic += [traffic[1], ("reduce_scatter", "gather", "gather")]
    for stage in range(4):
        sharded = dict(zip(full, (stage >= 3, stage >= 2, stage >= 1), strict=True))
        held = {kind: count // (2 if sharded[kind] else 1) for kind, count in full.items()}
        sent = Counter({kind: traffic[stage].count(kind) * PARAMETERS for kind in traffic[stage]})
        runs[f"stage-{stage}"] = (2, {"losses": losses, "seconds": 0.5, "bytes": held, "sent_bytes": sent})
    for run, (ranks, record) in runs.items():
        for rank in range(ranks):
            text = json.dumps({**record, **changes.get(run, {})})
            (folder / f"{run}-rank{rank}.json").write_text(text)


def judged(demo: Any, folder: Path, changes: dict[str, Any]) -> list[str]:
    write_runs(folder, demo.settings.SETTINGS, changes)
    run = demo.training_run.TrainingRun.read(folder)
    return run.failures() + demo.comparison.failures(demo.comparison.compare(folder, run.parameters))


def test_a_run_that_held_its_promises_passes_and_gets_its_report(demo: Any, tmp_path: Path) -> None:
    assert judged(demo, tmp_path, {}) == []
    run = demo.training_run.TrainingRun.read(tmp_path)
    rows = demo.comparison.compare(tmp_path, run.parameters)
    page = demo.report.write_report(tmp_path, run, rows, [], 1.0).with_suffix(".md").read_text()
    assert "All checks passed" in page and "| stage 3 ×2 | 3.50000 |" in page
    for image in ("loss.png", "memory.png"):
        assert (tmp_path / image).read_bytes().startswith(b"\x89PNG") and image in page


@pytest.mark.parametrize(
    ("run", "change", "said"),
    [
        ("end", {"held_out_after": 3.3}, "not below the text's byte-unigram entropy 3.200"),
        ("end", {"held_out_after": 3.19, "unigram_entropy": 9.0}, None),
        ("end", {"held_out_after": 3.4}, r"not below 0.6 x its start 5.600"),
        ("end", {"held_out_after": float("nan")}, "ended at nan"),
        ("end", {"held_out_before": 2.9}, "moved the held-out loss"),
        ("end", {"losses": [2.9]}, "expected 80 steps, got 61"),
        ("stage-2", {"losses": [5.0, 4.0, 3.5 + 1e-6]}, "stage 2: losses"),
        ("plain", {"losses": [5.0, 4.0, 3.6]}, "from the plain loop's"),
        ("plain", {"losses": [5.0, 4.0, float("nan")]}, "from the plain loop's"),
        ("stage-3", {"bytes": {"params": 2 * PARAMETERS, "grads": 0, "optimizer": 0}}, "stage 3: 8192 bytes"),
        ("stage-1", {"sent_bytes": {"gather_updated": 3 * PARAMETERS}}, "stage 1: 12288 bytes sent"),
    ],
)
def test_a_broken_promise_fails(
    demo: Any, tmp_path: Path, run: str, change: dict[str, Any], said: str | None
) -> None:
    run = f"train-{demo.settings.SETTINGS.steps}" if run == "end" else run
    found = judged(demo, tmp_path, {run: change})
    if said is None:
        assert found == []
    else:
        assert any(said in failure for failure in found), found


def test_the_settings_make_a_model_of_the_promised_size(demo: Any) -> None:
    settings = demo.settings.SETTINGS
    with torch.device("meta"):
        model = demo.language_model.build_model(settings)
    assert 20e6 < sum(parameter.numel() for parameter in model.parameters()) < 40e6
    assert settings.global_batch % settings.ranks == 0
    assert dataclasses.asdict(settings)["loss_bar"] == 0.6
