"""The demonstration of 3D parallelism: judgement, report, and one tiny run on four ranks."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = {"width": 16, "blocks": 2, "heads": 2, "window": 8, "batch": 8, "steps": 3}


@pytest.fixture(scope="module")
def demo() -> Iterator[Any]:
    """Imports the parts of the demonstration as `demo_3d.<part>`."""
    sys.path.insert(0, str(EXAMPLES))

    class DemoModules:
        def __getattr__(self, name: str) -> ModuleType:
            return importlib.import_module(f"demo_3d.{name}")

    yield DemoModules()
    sys.path.remove(str(EXAMPLES))


def test_met_and_broken_promises(demo: Any) -> None:
    settings = demo.settings.ThreeDSettings(steps=3)
    losses = [5.5, 4.0, 3.0]

    def outcomes(**changed: list[float]) -> dict[str, Any]:
        names = (demo.settings.ALONE, *demo.settings.LAYOUTS)
        return {name: demo.report.Outcome(changed.get(name, losses), 0.1, 9, 9, []) for name in names}

    assert not any(demo.report.failures(outcomes(), settings).values())
    broken = demo.report.failures(outcomes(pp_tp=[5.5, 4.01, 3.0]), settings)
    assert "differs from one process by 2.50e-03" in broken["pp_tp"][0]
    assert not broken["pp_dp"] and not broken["tp_dp"]
    broken = demo.report.failures(outcomes(alone=[2.9, 4.0, 3.0], tp_dp=[2.9, 4.0, 3.0]), settings)
    assert "above its start" in broken["tp_dp"][0]


def test_a_tiny_run_on_four_ranks(demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = importlib.import_module("demo.corpus")
    spec = importlib.util.spec_from_file_location("demo_3d_main", EXAMPLES / "demo_3d.py")
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    library = tmp_path / "library"
    library.mkdir()
    for number in range(30):
        (library / f"m{number}.py").write_text(f'"""{f"Some words of text number {number}. " * 40}"""\n')
    monkeypatch.setattr(corpus, "_topics", lambda: iter(()))
    monkeypatch.setattr(program, "gather_corpus", lambda: corpus.gather_corpus(library))
    settings = dataclasses.replace(demo.settings.ThreeDSettings(), **TINY)
    folder = tmp_path / "report"
    assert program.demonstrate(folder, settings, Console(quiet=True)) == 0
    page = (folder / "report.md").read_text()
    assert "All checks passed" in page and page.count("| passed |") == 3
    for name in ("loss", "timeline"):
        assert f"![{name}]({name}.png)" in page
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    split = demo.report.Outcome.read(folder, "pp_dp").parameters
    result = demo.report.Outcome.read(folder, "tp_dp")
    assert result.records[0]["sent"]["gather"] > 0 and split > 0
    slots = result.records[0]["slots"]
    assert len(slots) == 2 * settings.micro_batches
