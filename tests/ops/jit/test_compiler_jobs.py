"""Compiler calls side by side: how many at a time, what is said meanwhile, how they end."""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path

import pytest

from zero_ext.ops.jit import compiler_jobs as compiling
from zero_ext.ops.jit.compiler_jobs import CompilerCall, Progress, run_calls


def shell(label: str, script: str) -> CompilerCall:
    return CompilerCall(label, ["sh", "-c", script])


def run(folder: Path, calls: list[CompilerCall]) -> str:
    """Runs the calls; returns the log."""
    path = folder / "log"
    with path.open("wb") as log:
        run_calls(calls, folder, log, Progress("module", len(calls)))
    return path.read_text()


def is_running(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_log_holds_every_call_and_its_output(tmp_path: Path) -> None:
    log = run(tmp_path, [shell("one", "echo out; echo err >&2"), shell("two", "pwd")])
    assert "$ sh -c 'echo out; echo err >&2'\nout\nerr\n[status 0]\n" in log
    assert f"$ sh -c pwd\n{tmp_path}\n[status 0]\n" in log


def test_a_failure_ends_the_others_with_their_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_JOBS", "2")
    pid = tmp_path / "pid"
    slow = shell("slow", f"sleep 60 & echo $! > {pid}; wait")
    fails = shell("fails", f"while [ ! -s {pid} ]; do sleep 0.01; done; seq 30; exit 3")
    started = time.monotonic()
    with pytest.raises(
        RuntimeError, match=r"fails: it failed with status 3. Read the last of its 30 lines:\n11\n"
    ) as caught:
        run(tmp_path, [slow, fails, shell("never", f"touch {tmp_path}/never")])
    assert str(caught.value).endswith("\n30") and time.monotonic() - started < 55
    deadline = time.monotonic() + 30
    while is_running(int(pid.read_text())) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(int(pid.read_text())) and not (tmp_path / "never").exists()


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


def test_progress_is_for_terminals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress("module", 4)
    progress.start(tmp_path)
    progress.show(1, ["one.cu"])
    progress.end("built")
    start, end = capsys.readouterr().err.splitlines()
    assert (
        start == f"zero_ext: building module (4 files, once for this torch and these sources) in {tmp_path}"
    )
    assert end.startswith("zero_ext: built module in ")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(os, "get_terminal_size", lambda number: os.terminal_size((40, 24)))
    progress = Progress("module", 4)
    progress.show(3, ["csrc/cuda/one.cu", "csrc/cuda/two.cu"])
    progress.show(3, ["csrc/cuda/one.cu"])
    progress.end("built")
    line, last = terminal.getvalue().split("\r\x1b[K")[1:]
    assert line == "zero_ext: 3 of 4 files, 0 s: csrc/cuda/"[:39] and last.startswith(
        "zero_ext: built module in"
    )


@pytest.mark.parametrize("jobs", ["1", None])
def test_no_more_at_a_time_than_asked_for_or_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: str | None
) -> None:
    monkeypatch.setattr(compiling.os, "sched_getaffinity", lambda process: {5} if jobs is None else {5, 6, 7})
    monkeypatch.setenv("MAX_JOBS", jobs or "")
    alone = f"mkdir {tmp_path}/only && sleep 0.05 && rmdir {tmp_path}/only"
    run(tmp_path, [shell(str(index), alone) for index in range(3)])
