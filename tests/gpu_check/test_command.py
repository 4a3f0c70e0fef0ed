"""`python -m scripts.gpu_check`: exit statuses, files, options, and a bare machine."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from scripts.gpu_check import __main__ as command
from scripts.gpu_check.step import Step
from scripts.gpu_check.steps import gpu_steps, rehearsal_steps

ROOT = Path(__file__).resolve().parents[2]


def steps(code: str) -> list[Step]:
    return [
        Step("one", "prints a bar", (sys.executable, "-S", "-c", code), limit=20.0, least=0.1),
        Step("two", "prints words", (sys.executable, "-S", "-c", "print('words')"), limit=20.0, least=0.1),
    ]


def bar(value: float) -> str:
    result = {"bars": [{"name": "rate", "value": value, "bar": 1.0, "unit": "", "most": False}]}
    return f"print({json.dumps(result)!r})"


def report(folder: Path) -> dict[str, dict[str, object]]:
    """The steps of report.json by name; the folder holds no more files than may come back from a machine."""
    assert len(list(folder.iterdir())) <= 8
    data = json.loads((folder / "report.json").read_text())
    with tarfile.open(folder / "logs.tar.gz") as archive:
        assert set(archive.getnames()) == {f"logs/{step['log']}" for step in data["steps"] if step["log"]}
    return {step["name"]: step for step in data["steps"]}


def check(made: Sequence[Step], folder: Path, *more: str) -> int:
    """The exit status of a check of these steps on what passes for a GPU."""
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch.object(command, "gpu_steps", return_value=list(made)),
    ):
        return command.main(["--output", str(folder), *more])


def test_without_a_gpu_it_says_so_and_ends_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("torch.cuda.is_available", return_value=False):
        assert command.main(["--output", str(tmp_path / "report")]) == 3
    output = capsys.readouterr().out
    assert "No GPU: torch" in output and "--rehearse" in output
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(("value", "exit_status"), [(1.5, 0), (0.5, 1)])
def test_a_missed_bar_ends_with_1(
    tmp_path: Path, value: float, exit_status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "report"
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch.object(command, "gpu_steps", return_value=steps(bar(value))) as made,
    ):
        arguments = ["--output", str(output), "--memory", "64", "--suite", "speed"]
        assert command.main(arguments) == exit_status
    made.assert_called_once_with("speed", 64.0, output)
    data = json.loads((output / "report.json").read_text())
    assert data["judged"] and [step["status"] for step in data["steps"]] == ["passed", "passed"]
    assert {"GPU", "torch", "commit", "memory", "packages"} <= set(data["environment"])
    assert "rate: " in capsys.readouterr().out and (output / "report.md").is_file()


def test_a_rehearsal_judges_no_figure_and_failing_steps_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    for code, exit_status in ((bar(0.5), 0), ("raise SystemExit(2)", 1)):
        with mock.patch.object(command, "rehearsal_steps", return_value=steps(code)):
            assert command.main(["--rehearse"]) == exit_status
        data = json.loads((tmp_path / "report.json").read_text())
        assert not data["judged"] and data["exit_status"] == exit_status


def test_wrong_options_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(steps(""), tmp_path, "--only", "three") == 2
    assert "got three. Use one, two." in capsys.readouterr().err
    for arguments, text in ((["--budget", "0"], "--budget: expected"), (["--memory", "-1"], "--memory: exp")):
        with pytest.raises(SystemExit):
            command.main(arguments)
        assert text in capsys.readouterr().err
    with mock.patch.object(command, "ROOT", tmp_path), pytest.raises(SystemExit):
        command.main([])
    assert "expected a checkout" in capsys.readouterr().err


def test_faults_cost_one_step_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel that crashes, one that is wrong, a step that hangs, packages and tools that are missing."""
    python = (sys.executable, "-c")
    wrong = (
        "from tests.gpu import exercise; step, calls = exercise.ops.lion_step_, []\n"
        "def off_by_one(first, *rest): calls.append(step(first, *rest)); first.add_(len(calls) % 2)\n"
        "exercise.ops.lion_step_ = off_by_one; raise SystemExit(exercise.main())"
    )
    real = {step.name: replace(step, after=()) for step in rehearsal_steps("correctness")}
    faults = {
        "kernels-lion": (*python, wrong, "--family", "lion", "--device", "cpu"),
        "kernels-lamb": (*python, "import os; os.abort()"),
        "kernels-flat": (*python, "import time; print('began', flush=True); time.sleep(600)"),
    }
    made = [real["kernels-adam"], real["kernels-lion"], real["kernels-lamb"], real["kernels-flat"]]
    made = [
        replace(step, command=faults[step.name], limit=4.0 if step.name == "kernels-flat" else step.limit)
        if step.name in faults
        else step
        for step in made
    ]
    made += [step for step in gpu_steps("speed") if step.name == "counters"]
    assert check(made, tmp_path / "report", "--jobs", "2") == 1
    found = report(tmp_path / "report")
    assert found["kernels-adam"]["status"] == "passed"
    assert "lion on 1 elements differs" in str(found["kernels-lion"]["reason"]) + read_log(
        tmp_path / "report", "kernels-lion"
    )
    assert "ended by SIGABRT" in str(found["kernels-lamb"]["reason"])
    assert "its limit" in str(found["kernels-flat"]["reason"])
    assert found["counters"]["status"] == "skipped" and "ncu is not installed" in str(
        found["counters"]["reason"]
    )
    assert "began" in read_log(tmp_path / "report", "kernels-flat")


def read_log(folder: Path, step: str) -> str:
    with tarfile.open(folder / "logs.tar.gz") as archive:
        file = archive.extractfile(f"logs/{step}.log")
        assert file is not None
        return file.read().decode()


def test_nothing_runs_on_a_build_that_failed_and_the_report_says_so(tmp_path: Path) -> None:
    made = [replace(step, missing=lambda: "") for step in gpu_steps()]
    failing = "import sys; print('kernel.cu(7): error: no such thing', file=sys.stderr); sys.exit(1)"
    made[0] = replace(made[0], command=(sys.executable, "-S", "-c", failing))
    assert check(made, tmp_path / "report") == 1
    found = report(tmp_path / "report")
    assert "kernel.cu(7): error" in str(found["build"]["reason"])
    assert {step["reason"] for name, step in found.items() if name != "build"} == {"needs build to pass"}


def test_time_that_runs_out_leaves_the_rest_out_by_name(tmp_path: Path) -> None:
    made = [replace(step, least=100.0) for step in steps("")]
    assert check([replace(made[0], least=0.1), made[1]], tmp_path / "report", "--budget", "50") == 0
    found = report(tmp_path / "report")
    assert found["one"]["status"] == "passed" and found["two"]["status"] == "left out"


def test_python_and_torch_are_enough_for_the_runner(tmp_path: Path) -> None:
    """Nothing of zero_ext, nor any package beside torch, is imported; missing ones are named step by step."""
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import scripts.gpu_check.__main__ as command, scripts.gpu_check.build, scripts.gpu_check.counters\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names) - {'scripts'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    missing = replace(steps("print(1)")[0], missing=lambda: "Python cannot import pydantic")
    assert check([missing, steps("")[1]], tmp_path / "report") == 0
    found = report(tmp_path / "report")
    assert found["one"]["reason"] == "Python cannot import pydantic" and found["two"]["status"] == "passed"
