"""Trials as processes: measured, out of memory, killed, hanging, broken, lying."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from zero_ext.config import ZeroConfig
from zero_ext.plan.trial import Launch, Trial, TrialOutcome, run_trial

CONFIG = ZeroConfig.from_mapping({"stage": 2, "batch": {"micro_batch_size": 4}})
READ = "import json, os; config = json.load(open(os.environ['ZERO_EXT_TRIAL_CONFIG']));"
WRITE = "open(os.environ['ZERO_EXT_TRIAL_RESULT'], 'w').write"


def outcome(folder: Path, script: str, timeout: float = 20.0) -> TrialOutcome:
    path = folder / "script.py"
    path.write_text(script)
    return run_trial(Launch(path, ("--flag",), steps=3, timeout=timeout), CONFIG)


def test_a_result_is_read_and_the_configuration_arrives(tmp_path: Path) -> None:
    found = outcome(
        tmp_path,
        f"{READ}import sys\nassert sys.argv[1:] == ['--flag']; assert config['stage'] == 2\n"
        "assert os.environ['ZERO_EXT_TRIAL_STEPS'] == '3'\n"
        f"{WRITE}(json.dumps({{'samples_per_second': 12.5}}))",
    )
    assert (found.fate, found.samples_per_second) == ("measured", 12.5)


@pytest.mark.parametrize(
    ("script", "fate", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "out of memory", "killed"),
        ("raise MemoryError('no room')", "out of memory", "MemoryError: no room"),
        (
            "class OutOfMemoryError(RuntimeError): pass\nraise OutOfMemoryError('device')",
            "out of memory",
            "device",
        ),
        ("raise ValueError('wrong shape')", "failed", "ValueError: wrong shape"),
        ("import sys; sys.exit(7)", "failed", "exit status 7"),
        ("", "failed", "ended without a result"),
        (f"import os\n{WRITE}('not json')", "failed", "cannot be read"),
        (f"import os\n{WRITE}('{{\"samples_per_second\": -1}}')", "failed", "cannot be read"),
        (f"import os\n{WRITE}('{{\"samples_per_second\": true}}')", "failed", "cannot be read"),
        ("this is no Python", "failed", "SyntaxError"),
    ],
)
def test_every_end_has_its_fate(tmp_path: Path, script: str, fate: str, reason: str) -> None:
    found = outcome(tmp_path, script)
    assert found.fate == fate
    assert reason in found.reason
    assert found.samples_per_second == 0


def test_a_trial_that_hangs_is_ended_with_all_it_started(tmp_path: Path) -> None:
    begin = time.monotonic()
    found = outcome(
        tmp_path,
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\ntime.sleep(600)",
        timeout=8.0,
    )
    assert found.fate == "timed out"
    assert time.monotonic() - begin < 60
    pid = int((tmp_path / "pid").read_text())
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.02)
    raise AssertionError("the trial's child lives on")


def test_who_has_left_a_result_is_not_waited_for(tmp_path: Path) -> None:
    begin = time.monotonic()
    found = outcome(
        tmp_path, f"import os, time\n{WRITE}('{{\"samples_per_second\": 3}}')\ntime.sleep(600)", 60.0
    )
    assert found.fate == "measured"
    assert time.monotonic() - begin < 59


def test_a_script_says_nothing_outside_a_trial() -> None:
    assert os.environ.get("ZERO_EXT_TRIAL_CONFIG") is None
    trial = Trial.current({"stage": 1})
    assert trial.config.stage == 1
    assert list(trial.steps(range(5))) == [0, 1, 2, 3, 4]


@pytest.fixture
def in_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path, result = tmp_path / "config.json", tmp_path / "result.json"
    path.write_text(json.dumps({"batch": {"micro_batch_size": 4, "gradient_accumulation_steps": 2}}))
    monkeypatch.setenv("ZERO_EXT_TRIAL_CONFIG", str(path))
    monkeypatch.setenv("ZERO_EXT_TRIAL_STEPS", "3")
    monkeypatch.setenv("ZERO_EXT_TRIAL_RESULT", str(result))
    return result


def test_a_trial_times_its_steps_and_ends(in_trial: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    now = [100.0]
    monkeypatch.setattr("zero_ext.plan.trial.time.perf_counter", lambda: now[0])
    trial, batches_seen = Trial.current({"stage": 1}), 0
    assert trial.config.stage == 3
    for _ in trial.steps(iter(range(1000))):
        batches_seen += 1
        now[0] += 5.0 if batches_seen <= 4 else 0.25  # the warm-up's steps are slow and do not count
    assert batches_seen == (2 + 3) * 2
    found = json.loads(in_trial.read_text())
    assert found["seconds"] == pytest.approx(6 * 0.25)
    assert found["samples_per_second"] == pytest.approx(6 * 4 * 2 / found["seconds"])


def test_other_ranks_write_nothing_and_short_loaders_are_refused(
    in_trial: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="expected 10, got 9"):
        list(Trial.current().steps(range(9)))
    monkeypatch.setenv("RANK", "1")
    list(Trial.current().steps(range(1000)))
    assert not in_trial.exists()
    for steps in ("0", "many", ""):
        monkeypatch.setenv("ZERO_EXT_TRIAL_STEPS", steps)
        with pytest.raises(ValueError, match="ZERO_EXT_TRIAL_STEPS"):
            Trial.current()
