"""The demonstration of compressed communication: judgement, report, and one tiny run on four ranks."""

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
TINY = {"hidden_size": 32, "layers": 1, "feed_forward_size": 64, "heads": 2, "window": 32, "batch": 1}
SHORT = {"steps": 6, "warm_up": 2, "held_out_every": 3, "held_out_windows": 4}


@pytest.fixture(scope="module")
def demo() -> Iterator[Any]:
    """Imports the parts of the demonstration as `demo_compressed.<part>`."""
    sys.path.insert(0, str(EXAMPLES))

    class DemoModules:
        def __getattr__(self, name: str) -> ModuleType:
            return importlib.import_module(f"demo_compressed.{name}")

    yield DemoModules()
    sys.path.remove(str(EXAMPLES))


def outcomes_of(demo: Any, settings: Any, **changes: dict[str, Any]) -> dict[str, Any]:
    """CommunicationSetup that keep every promise, but for `changes`."""
    after = {"adam": 3200, "onebit_adam": 200, "zero_one_adam": 100, "zero3": 4800, "zeropp": 1200}
    found = {}
    for name, count in after.items():
        warm = count if name in ("adam", "zero3", "zeropp") else 3200
        crossing = [warm] * settings.warm_up + [count] * (settings.steps - settings.warm_up)
        values = {"name": name, "losses": [3.0] * settings.steps, "held_out": [(0, 5.6), (240, 2.5)]}
        values |= {"crossing": crossing, "seconds": 0.1} | changes.get(name, {})
        found[name] = demo.outcome.Outcome(**values)
    return found


def test_met_and_broken_promises(demo: Any) -> None:
    settings = demo.settings.CompressedSettings()
    assert not any(demo.outcome.failures(outcomes_of(demo, settings), 3.2, settings).values())
    for name, change, words in (
        ("onebit_adam", {"held_out": [(0, 5.6), (240, 2.8)]}, "1.120 times that of adam"),
        ("zero_one_adam", {"crossing": [400] * settings.steps}, "8.0 times fewer bytes than adam"),
        ("zeropp", {"crossing": [1600] * settings.steps}, "3.0 times fewer bytes than zero3"),
        ("zero3", {"losses": [3.0]}, f"expected {settings.steps} steps, got 1"),
        ("adam", {"held_out": [(0, 5.6), (240, 3.3)]}, "not below the 3.200 of byte frequencies"),
    ):
        broken = demo.outcome.failures(outcomes_of(demo, settings, **{name: change}), 3.2, settings)
        assert len(broken[name]) == 1 and words in broken[name][0]
        assert not any(lines for other, lines in broken.items() if other != name)


def test_the_report_has_both_plots(demo: Any, tmp_path: Path) -> None:
    settings = demo.settings.CompressedSettings()
    outcomes = outcomes_of(demo, settings, onebit_adam={"held_out": [(0, 5.6), (240, 2.8)]})
    broken = demo.outcome.failures(outcomes, 3.2, settings)
    page = (
        demo.report.write_report(tmp_path, outcomes, 3.2, settings, broken, 200.0)
        .with_suffix(".md")
        .read_text()
    )
    assert "- 1-bit Adam: the held-out loss ended at 1.120 times" in page
    cells = {row[0]: row for row in demo.report.rows(outcomes, broken, settings)}
    assert cells["1-bit Adam"][-1] == "FAILED" and cells["ZeRO++"][-1] == "passed" and cells["Adam"][-1] == ""
    assert cells["1-bit Adam"][5] == "16.0" and cells["ZeRO++"][5] == "4.0"
    for name in ("loss", "bytes"):
        assert f"![{name}]({name}.png)" in page
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_tiny_run_on_four_ranks(demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = importlib.import_module("demo.corpus")
    program = _program()
    library = tmp_path / "library"
    library.mkdir()
    for number in range(30):
        text = f"Some words of text number {number}. " * 40
        (library / f"m{number}.py").write_text(f'"""{text}"""\n')
    monkeypatch.setattr(corpus, "_topics", lambda: iter(()))
    monkeypatch.setattr(program, "gather_corpus", lambda: corpus.gather_corpus(library))
    settings = dataclasses.replace(demo.settings.CompressedSettings(), **TINY, **SHORT)
    folder = tmp_path / "report"
    program.demonstrate(folder, settings, Console(quiet=True))  # so short a run keeps no promise
    assert (
        importlib.import_module("demo.folder").read_settings(demo.settings.CompressedSettings, folder)
        == settings
    )
    for name in demo.modes.MODES:
        outcome = demo.outcome.Outcome.read(folder, name)
        assert len(outcome.losses) == 6 and [step for step, _ in outcome.held_out] == [0, 3, 6]
        start = demo.outcome.Outcome.read(folder, "adam").held_out[0][1]
        assert outcome.held_out[0][1] == pytest.approx(start, rel=1e-3 if name == "zeropp" else 1e-12)
    one_bit, adam = (demo.outcome.Outcome.read(folder, name) for name in ("onebit_adam", "adam"))
    assert one_bit.crossing[:2] == adam.crossing[:2] and one_bit.crossing[2] < adam.crossing[2]
    assert (folder / "report.md").exists()


def _program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_compressed_main", EXAMPLES / "demo_compressed.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
