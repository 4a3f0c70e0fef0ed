"""`python -m zero_ext.gpu_check`: exit statuses, files, options."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import typer
from typer.testing import CliRunner

from zero_ext.gpu_check import __main__ as command
from zero_ext.gpu_check.step import Step

APP = typer.Typer()
APP.command()(command.main)


def steps(code: str) -> list[Step]:
    return [
        Step("one", "prints a bar", (sys.executable, "-S", "-c", code), limit=20.0, least=0.1),
        Step("two", "prints words", (sys.executable, "-S", "-c", "print('words')"), limit=20.0, least=0.1),
    ]


def bar(value: float) -> str:
    result = {"bars": [{"name": "rate", "value": value, "bar": 1.0, "unit": "", "most": False}]}
    return f"print({json.dumps(result)!r})"


def test_without_a_gpu_it_says_so_and_ends_with_3(tmp_path: Path) -> None:
    with mock.patch("torch.cuda.is_available", return_value=False):
        done = CliRunner().invoke(APP, ["--output", str(tmp_path / "report")])
    assert done.exit_code == 3
    assert "No GPU: torch" in done.output and "--rehearse" in done.output
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(("value", "exit_status"), [(1.5, 0), (0.5, 1)])
def test_a_missed_bar_ends_with_1(tmp_path: Path, value: float, exit_status: int) -> None:
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch.object(command, "gpu_steps", return_value=steps(bar(value))) as made,
    ):
        done = CliRunner().invoke(APP, ["--output", str(tmp_path / "report"), "--memory", "64"])
    assert done.exit_code == exit_status, done.output
    made.assert_called_once_with(64.0)
    data = json.loads((tmp_path / "report" / "report.json").read_text())
    assert data["judged"] and [step["status"] for step in data["steps"]] == ["passed", "passed"]
    assert {"GPU", "torch", "commit", "memory"} <= set(data["environment"])
    assert "rate: " in done.output and (tmp_path / "report" / "report.md").is_file()


def test_a_rehearsal_judges_no_figure_and_failing_steps_all_the_same(tmp_path: Path) -> None:
    for code, exit_status in ((bar(0.5), 0), ("raise SystemExit(2)", 1)):
        with mock.patch.object(command, "rehearsal_steps", return_value=steps(code)):
            done = CliRunner().invoke(APP, ["--rehearse", "--output", str(tmp_path)])
        assert done.exit_code == exit_status, done.output
    assert "two" in done.output and "words" in done.output


def test_unknown_steps_are_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(APP, ["--rehearse", "--only", "nonsense", "--output", str(tmp_path / "report")])
    assert done.exit_code == 2 and "nonsense" in done.output
    assert not (tmp_path / "report").exists()


def test_elsewhere_than_in_a_source_tree_it_says_what_it_needs(tmp_path: Path) -> None:
    with mock.patch.object(command, "ROOT", tmp_path):
        done = CliRunner().invoke(APP, [])
    assert done.exit_code == 2 and "checkout" in done.output
