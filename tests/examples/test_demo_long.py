"""The demonstration of long sequences: its judgement, its pictures, and one tiny run."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = {"hidden_size": 64, "layers": 1, "feed_forward_size": 64, "heads": 2, "window": 256, "steps": 2}


@pytest.fixture(scope="module")
def demo() -> Iterator[Any]:
    """Imports the parts of the demonstration as `demo_long.<part>`."""
    sys.path.insert(0, str(EXAMPLES))

    class DemoModules:
        def __getattr__(self, name: str) -> ModuleType:
            return importlib.import_module(f"demo_long.{name}")

    yield DemoModules()
    sys.path.remove(str(EXAMPLES))


def result_of(demo: Any, dense: int, sparse: int, held_out: tuple[float, float]) -> Any:
    ending = demo.processes.Ending
    record = {"losses": [3.0], "seconds": [2.0], "held_out": held_out, "peak_bytes": 2_000_000_000}
    words = ["the attention matrix of one layer takes 4,295 MB"]
    return demo.report.Result(
        cap=(3_500_000_000, "memory cgroup v1", 400_000_000),
        endings={
            "dense": ending(dense, 0 if dense != -9 else 1, words),
            "sparse": ending(sparse, 0, []),
            "flash": ending(0, 0, []),
        },
        records={
            "dense": None,
            "sparse": record if sparse == 0 else None,
            "flash": record | {"held_out": [None, None]},
        },
        unigram=3.1,
    )


def test_met_and_broken_promises(demo: Any, tmp_path: Path) -> None:
    settings = demo.settings.LongSettings()
    refused = demo.processes.OUT_OF_MEMORY
    for dense in (refused, -9):
        assert demo.report.failures(result_of(demo, dense, 0, (5.6, 2.9)), settings) == []
    for arguments, words in (
        ((0, 0, (5.6, 2.9)), "dense attention under the cap: expected 'out of memory', got 'trained'"),
        ((1, 0, (5.6, 2.9)), "failed, status 1"),
        ((refused, refused, (5.6, 2.9)), "expected 'trained', got 'out of memory'"),
        ((refused, 0, (5.6, 3.15)), "below 3.100 nats per byte"),
    ):
        (failure,) = demo.report.failures(result_of(demo, *arguments), settings)
        assert words in failure


def test_the_report_has_plots_of_every_layout(demo: Any, tmp_path: Path) -> None:
    settings = dataclasses.replace(demo.settings.LongSettings(), window=2048)
    result = result_of(demo, demo.processes.OUT_OF_MEMORY, 0, (5.6, 2.9))
    page = demo.report.write_report(tmp_path, result, settings, [], 200.0).with_suffix(".md").read_text()
    assert "4,295 MB" in page
    assert "5.600 → 2.900" in page
    for mode in ("fixed", "variable", "bigbird", "bslongformer", "local_sliding_window"):
        assert f"![{mode}](layout-{mode}.png)" in page
        assert (tmp_path / f"layout-{mode}.png").read_bytes().startswith(b"\x89PNG")


def test_a_tiny_run_trains_and_reports(demo: Any, tmp_path: Path) -> None:
    corpus = importlib.import_module("demo.corpus")
    library = tmp_path / "library"
    library.mkdir()
    (library / "one.py").write_text('"""' + "Some words of text. " * 60 + '"""\n')
    corpus.gather_corpus(library).write(tmp_path)
    settings = dataclasses.replace(demo.settings.LongSettings(), **TINY, held_out_windows=1)
    importlib.import_module("demo.folder").write_settings(settings, tmp_path)
    assert (
        importlib.import_module("demo.folder").read_settings(demo.settings.LongSettings, tmp_path) == settings
    )
    assert demo.train.main(tmp_path, "sparse") == 0
    record = json.loads((tmp_path / "sparse-rank0.json").read_text())
    assert len(record["losses"]) == 2
    before, after = record["held_out"]
    assert after < before


@pytest.mark.parametrize("refused", [True, False])
def test_what_counts_as_out_of_memory(
    demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    def fail(*_: object) -> None:
        if refused:
            torch.empty(1 << 50)
        raise RuntimeError("unsupported memory_format option Preserve")

    importlib.import_module("demo.folder").write_settings(demo.settings.LongSettings(), tmp_path)
    monkeypatch.setattr(demo.train, "train", fail)
    if refused:
        assert demo.train.main(tmp_path, "dense") == demo.processes.OUT_OF_MEMORY
    else:
        with pytest.raises(RuntimeError, match="memory_format"):
            demo.train.main(tmp_path, "dense")
