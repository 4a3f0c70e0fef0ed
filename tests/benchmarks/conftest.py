"""The benchmarks are programs of the repository, not of the installed package: make them importable."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

Concluded = Callable[..., tuple[dict[str, Any], int]]


@pytest.fixture
def concluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Concluded:
    """``concluded(main, *options)`` runs a benchmark as a trial, in a folder of the test: what it wrote as
    JSON, and its exit status. Both files are there, and a missed bar is named on stderr with status 1."""
    from benchmarks.harness import report

    folder = tmp_path / "results"
    monkeypatch.setattr(report, "TRIALS", folder)

    def run(main: Callable[..., None], *options: Any, **named: Any) -> tuple[dict[str, Any], int]:
        status = 0
        try:
            main(*options, **named)
        except typer.Exit as ended:
            status = ended.exit_code
        said = capsys.readouterr()
        assert "A trial, not recorded" in said.out
        assert ("FAILED" in said.err) == (status == 1)
        (written,) = folder.rglob("*.json")
        assert written.with_suffix(".md").read_text().startswith("# ")
        data = json.loads(written.read_text())
        assert bool(data["missed"]) == (status == 1)
        return data, status

    return run
