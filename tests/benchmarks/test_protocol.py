"""The protocol: what is recorded, what is a trial, what is outdated, and the program that runs all of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as program
from benchmarks import memory, offload, step
from benchmarks.harness import recorded, registered, report
from benchmarks.harness.environment import Start
from benchmarks.harness.matches import Match
from benchmarks.harness.registered import NO_CHECKPOINTS, ROOT, SHARED_SOURCES, Run, run_of_command
from benchmarks.runs import RUNS

NO_BENCHMARKS = {"runs", "tuned_script"}
TOY_RUNS = """
from benchmarks.harness.registered import Run

RUNS = (Run("toy", "toy"), Run("toy-three", "toy", ("--bar", "3"), quick=True))
"""
TOY = """
from typing import Annotated

import typer

from benchmarks.harness.environment import describe
from benchmarks.harness.report import Table, conclude, terminal
from benchmarks.harness.statistics import ratio_of_rounds


def main(bar: float = 1.5, touch: str = "") -> None:
    console = terminal()
    if touch:
        open(touch, "w").close()
    ratio = ratio_of_rounds([2.0, 4.0], [1.0, 2.0])
    missed = [] if ratio.at_most(bar) else ["ratio"]
    table = Table("Toy", ("ratio", "met"), [(ratio.text(), "")])
    conclude(console, "toy", "Toy", [table], {"environment": describe()}, missed)


typer.run(main)
"""


def test_missed_bars_of_steps_and_peaks_are_named() -> None:
    ratio = {"median": 0.6, "low": 0.5, "high": 0.8, "rounds": 9}
    row = {"model": "m", "subject": "a", "peer": "b", "ratio": ratio, "bar": 0.7}
    assert step.missed_bars([row | {"met": "yes"}, row | {"met": ""}]) == []
    assert step.missed_bars([row | {"met": "no"}]) == ["m, a / b: 0.600 (0.500–0.800), at most 0.7 wanted"]
    peaks = [row | {"ratio": value, "bar": bar} for value, bar in ((0.8, 0.7), (0.6, 0.7), (0.8, None))]
    formula = [{"model": "m", "contender": "a", "off_by": off, "tolerance": 0.1} for off in (-0.2, 0.05)]
    assert offload.missed_peaks(peaks, formula) == [
        "m, a / b: peak 0.800, bar 0.7",
        "m, a: peak -20.0% off the formula",
    ]
    readings = {
        "tiny": {key: dict.fromkeys(memory.READINGS, size) for key, size in (("stage3", 1), ("fsdp2", 2))}
    }
    rows = memory.peak_rows([Match("stage3", (("fsdp2", None),))], readings)
    assert memory.peak_table(rows).rows[0][2:] == ["0.500", "0.500", "yes", "0.500", "", ""]
    assert memory.missed_memory(rows) == []


def test_every_benchmark_has_a_run_and_every_run_a_name_of_its_own() -> None:
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")} - NO_BENCHMARKS
    assert {run.module for run in RUNS} == scripts
    assert len({run.name for run in RUNS}) == len({run.command for run in RUNS}) == len(RUNS)
    assert RUNS[-1].name == "simulation"
    assert 5 < sum(run.minutes for run in RUNS if run.quick) < 15


def test_a_run_leaves_rounds_and_steps_to_the_script() -> None:
    options = {word for run in RUNS for word in run.arguments if word.startswith("--")}
    workload = {"--ranks", "--tokens", "--accumulation"}
    assert options <= {
        "--models",
        "--only",
        "--modes",
        "--what",
        "--seeds",
        "--minutes",
        "--threads",
        *workload,
    }


def test_a_command_is_a_run_only_with_exactly_its_arguments() -> None:
    script = str(ROOT / "benchmarks" / "step.py")
    run = run_of_command(RUNS, [script, "--models", "34m"])
    assert (
        run is not None and run.name == "step-34m" and run.command == "python -m benchmarks.step --models 34m"
    )
    for arguments in ([], ["--models", "34m", "--rounds", "9"], ["--models", "tiny"]):
        assert run_of_command(RUNS, [script, *arguments]) is None
    assert run_of_command(RUNS, [str(ROOT / "benchmarks" / "gpu" / "step.py"), "--models", "34m"]) is None


def test_sources_are_the_package_and_the_files_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "one.py": "from benchmarks.harness.timer import (\n    time_of,\n)\nfrom benchmarks.runs import RUNS",
        "two.py": 'from benchmarks.harness import worker\nSTARTED = ["started.py", "one"]',
        "runs.py": "RUNS = ()",
        "started.py": "from benchmarks.peers import contender_named",
        "harness/timer.py": "import time",
        "harness/worker.py": 'WORKER = "benchmarks.harness.timer"',
        "peers/__init__.py": "from benchmarks.peers.tuned_settings import settings_of",
        "peers/tuned_settings.py": "import json",
        "peers/idle.py": "from benchmarks import one",
        "saves.py": "from benchmarks.harness import saver",
        "harness/saver.py": "import zero_ext\n\nzero_ext.save_checkpoint",
        "peers/tuned_settings/34m.json": "{}",
        "peers/tuned_settings/239m.json": "{}",
    }
    for name, text in files.items():
        file = tmp_path / "benchmarks" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(registered, "ROOT", tmp_path)

    def own(*arguments: str, module: str = "two") -> set[str]:
        found = Run("", module, arguments).sources()
        assert found[: len(SHARED_SOURCES)] == [*SHARED_SOURCES]
        paths = {*found[len(SHARED_SOURCES) :]}
        assert (NO_CHECKPOINTS in paths) == (module != "saves")
        return {path.removeprefix("benchmarks/") for path in paths - {NO_CHECKPOINTS}}

    registered.used_files.cache_clear()
    assert own(module="one") == {"one.py", "harness/timer.py"}
    assert own(module="saves") == {"saves.py", "harness/saver.py"}
    peers = {"peers/__init__.py", "peers/tuned_settings.py"}
    alone = {"two.py", "started.py", "harness/worker.py", "harness/timer.py", *peers}
    assert own() == alone
    assert own("--models", "34m") == {*alone, "peers/tuned_settings/34m.json"}
    assert own("--models", "34m,tiny,239m") == alone | {name for name in files if name.endswith(".json")}
    registered.used_files.cache_clear()


def test_sources_of_real_runs() -> None:
    runs = {run.name: set(run.sources()) for run in RUNS}
    assert "benchmarks/tuned_script.py" in runs["tune"] and "benchmarks/harness/ranks.py" not in runs["adam"]
    steps = {
        f"benchmarks/{name}.py" for name in ("step", "harness/worker", "peers/fsdp2", "peers/deepspeed_zero")
    }
    assert steps <= runs["step-34m"] and steps <= runs["offload"]
    assert "benchmarks/peers/tuned_settings/34m.json" in runs["step-34m"] - runs["step-239m"]
    with_checkpoints = {run.module for run in RUNS if NO_CHECKPOINTS not in runs[run.name]}
    assert {"checkpoint", "load", "scale", "convergence", "aio"} <= with_checkpoints
    assert not {"step", "adam", "host_time", "trainer"} & with_checkpoints


def test_training_does_not_import_checkpoints() -> None:
    """Otherwise results of steps would be outdated with them."""
    script = """
import sys, torch, zero_ext
for stage in range(4):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = zero_ext.prepare(model, optimizer, {"stage": stage})
    model.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
print([name for name in sys.modules if name.startswith(("zero_ext.checkpoint", "zero_ext.zero.engine"))])
"""
    found = subprocess.run([sys.executable, "-c", script], check=True, text=True, capture_output=True).stdout
    assert "zero_ext.zero.engine" in found and "zero_ext.checkpoint" not in found


def test_runs_of_tuned_peers_name_their_models() -> None:
    tuned = [run for run in RUNS if {"benchmarks/step.py", "benchmarks/memory.py"} & set(run.sources())]
    assert {"step", "memory", "offload", "muon", "trainer"} <= {run.module for run in tuned}
    assert [run.name for run in tuned if "--models" not in run.arguments] == []


@pytest.mark.parametrize(
    ("begun", "ended", "complete", "reason"),
    [
        ("abc", "abc", True, ""),
        ("abc", "abc", False, "not finished"),
        ("abc-dirty", "abc-dirty", True, "had changes or untracked files"),
        ("abc", "abc-dirty", True, "changed meanwhile"),
        ("unknown", "unknown", True, "does not name the commit"),
    ],
)
def test_reasons_for_a_trial(
    begun: str, ended: str, complete: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "start", lambda: Start(0.0, begun, "0"))
    monkeypatch.setattr(report, "commit", lambda: ended)
    found = report.why_not_recorded(RUNS[0], complete)
    assert reason in found and bool(found) == bool(reason)
    assert "its options" in report.why_not_recorded(None, complete)


def test_results_from_before_the_protocol_are_outdated() -> None:
    results = {each.name: each for each in recorded.recorded_results(RUNS, report.RESULTS)}
    assert "convergence/34m-small-batches" in results and not any(name.startswith("gpu/") for name in results)
    assert results["convergence/34m-small-batches"].why_outdated() == "no registered run"


@pytest.mark.parametrize(
    ("command", "commit", "missed", "reason", "met"),
    [
        ("python -m benchmarks.lamb", "abc", {"missed": []}, "", "yes"),
        ("python -m benchmarks.lamb", "abc", {"missed": ["a", "b"]}, "", "2 missed"),
        ("python -m benchmarks.lamb --rounds 99", "abc", {"missed": []}, "other arguments", "yes"),
        ("python -m benchmarks.lamb", "abc-dirty", {"missed": []}, "from a tree with changes", "yes"),
        ("python -m benchmarks.lamb", "abc", {}, "from before the protocol", ""),
    ],
)
def test_results_that_the_protocol_would_not_record(
    command: str, commit: str, missed: dict[str, list[str]], reason: str, met: str
) -> None:
    data = {"environment": {"command": command, "commit": commit}, **missed}
    result = recorded.Recorded(Path("lamb.json"), "lamb", Run("lamb", "lamb"), data)
    assert (result.why_no_protocol(), result.met) == (reason, met)
    assert result.why_outdated() == (reason or "commit not found")


class Repository:
    """A git repository with the harness of this one, the benchmark TOY and its runs. Its ``zero_ext`` is a
    stand-in, which is imported in no time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        benchmarks = ROOT / "benchmarks"
        for name in ("__init__", "__main__", "harness/__init__", *(f"harness/{each}" for each in HARNESS)):
            target = root / "benchmarks" / f"{name}.py"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(benchmarks / f"{name}.py", target)
        (root / "benchmarks" / "runs.py").write_text(TOY_RUNS)
        (root / "benchmarks" / "toy.py").write_text(TOY)
        package = root / "zero_ext" / "cli"
        package.mkdir(parents=True)
        (package / "environment.py").write_text('def peer_memory() -> str:\n    return "yes"\n')
        (root / ".gitignore").write_text("build/\n__pycache__/\n")
        self.git("init", "-q")
        self.commit()

    def git(self, *arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *arguments], cwd=self.root, check=True, capture_output=True)

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-qm", "all")

    def call(self, *words: str) -> tuple[int, str]:
        """Exit status and output of ``python -m benchmarks...``."""
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=self.root,
            env=os.environ | {"PYTHONPATH": str(self.root), "TERM": "dumb", "COLUMNS": "170"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        return done.returncode, done.stdout + done.stderr

    def results(self) -> set[str]:
        return {path.stem for path in (self.root / "benchmarks" / "results").glob("*.json")}


HARNESS = ("environment", "recorded", "registered", "report", "statistics")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_runs_are_recorded_once_and_again_when_their_code_changed(repository: Repository) -> None:
    status, said = repository.call("benchmarks", "run", "--quick")
    assert status == 0 and "1 of 1: toy-three, about 1 min, 1 min left" in said
    assert repository.results() == {"toy-three"}
    status, said = repository.call("benchmarks", "run")
    assert status == 1 and "1 of 2 results are fresh" in said and "recorded, 1 missed" in said
    data = json.loads((repository.root / "benchmarks" / "results" / "toy.json").read_text())
    assert data["missed"] == ["ratio"]
    origin = data["environment"]
    assert len(origin["commit"]) == 10 and origin["command"] == "python -m benchmarks.toy"
    assert {"transport", "threads", "minutes", "load averages at the start", "huge pages"} <= origin.keys()
    status, said = repository.call("benchmarks", "run")
    assert status == 0 and "2 of 2 results are fresh" in said

    script = repository.root / "benchmarks" / "toy.py"
    script.write_text(script.read_text().replace("[2.0, 4.0]", "[1.0, 2.0]"))
    for other in ("README.md", "zero_ext/README.md", "csrc/cuda/copy.cu"):  # no sources of the benchmark
        file = repository.root / other
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    status, said = repository.call("benchmarks", "run")
    assert status == 2 and "expected no changes, got 4" in said
    repository.commit()
    assert "1 file changed" in repository.call("benchmarks", "results")[1]
    status, said = repository.call("benchmarks", "run", "toy")
    assert status == 0 and "recorded, all bars met" in said


@pytest.mark.parametrize(
    ("arguments", "untracked", "reason"),
    [
        (("--bar", "2"), "", "its options are not those of a run"),
        ((), "new.py", "the working tree had changes or untracked files"),
        (("--bar", "3"), "", ""),
    ],
)
def test_only_runs_of_the_protocol_are_recorded(
    arguments: tuple[str, ...], untracked: str, reason: str, repository: Repository
) -> None:
    if untracked:
        (repository.root / untracked).touch()
    _, said = repository.call("benchmarks.toy", *arguments)
    assert (f"A trial, not recorded: {reason}" if reason else "Recorded.") in said
    assert repository.results() == (set() if reason else {"toy-three"})
    assert (repository.root / "build" / "benchmarks" / "toy.json").exists() == bool(reason)


def test_repeats_at_one_commit_are_counted(repository: Repository) -> None:
    for _ in range(2):
        repository.call("benchmarks.toy")
    text = (repository.root / "benchmarks" / "results" / "toy.md").read_text()
    assert "- measurements at this commit: 2\n" in text


def test_a_run_that_is_ended_names_the_command_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, timeout: float, **__: object) -> None:
        assert timeout == 60 * (10 * 12 + 10)
        raise subprocess.TimeoutExpired("measured", timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    found = program.measure(Run("slow", "adam", ("--threads", "1"), minutes=12))
    assert found == "ended after 2 h 10 min, python -m benchmarks.adam --threads 1 has no limit"
