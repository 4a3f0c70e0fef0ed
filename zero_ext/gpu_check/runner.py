"""Runs steps one after another, each as a process of its own within what is left of the time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zero_ext.gpu_check.step import Outcome, Step

# A step that keeps to its own time is given this much longer to write what it has and to remove its files.
GRACE_SECONDS = 10.0
LINES_OF_A_FAILURE = 12


class Runner:
    """Steps within a deadline.

    Args:
        folder: the source tree, where the programs start.
        logs: folder for the output of every step.
        seconds: time for all of them.
        tell: takes a line for the terminal.
        judged: whether figures that miss their bar are told so.
    """

    def __init__(
        self, folder: Path, logs: Path, seconds: float, tell: Callable[[str], None], judged: bool = True
    ) -> None:
        self._folder = folder
        self._logs = logs
        self._began = time.monotonic()
        self._deadline = self._began + seconds
        self._tell = tell
        self._judged = judged

    def run(self, steps: Sequence[Step]) -> list[Outcome]:
        """The outcome of every step, in order; a step that fails does not stop the others."""
        outcomes: dict[str, Outcome] = {}
        for step in steps:
            self._tell(f"[{time.monotonic() - self._began:6.1f} s] {step.name}: {step.title}")
            outcome = self._outcome(step, outcomes)
            outcomes[step.name] = outcome
            self._report(outcome)
        return list(outcomes.values())

    def _report(self, outcome: Outcome) -> None:
        took = f" in {outcome.seconds:.1f} s" if outcome.log else ""
        self._tell(f"           {outcome.status}{took}{f': {outcome.reason}' if outcome.reason else ''}")
        for bar in outcome.bars:
            missed = self._judged and not bar.met
            self._tell(f"           {bar.name}: {bar.text()}{'  MISSED' if missed else ''}")
        for what in outcome.left_out:
            self._tell(f"           left out: {what}")

    def _outcome(self, step: Step, before: Mapping[str, Outcome]) -> Outcome:
        broken = [name for name in step.after if name in before and before[name].status != "passed"]
        if broken:
            return Outcome(step.name, step.title, "skipped", reason=f"needs {', '.join(broken)} to pass")
        missing = step.missing()
        if missing:
            return Outcome(step.name, step.title, "skipped", reason=missing)
        left = self._deadline - time.monotonic()
        if left < step.least:
            reason = f"{max(left, 0.0):.0f} s were left, it needs {step.least:.0f}"
            return Outcome(step.name, step.title, "left out", reason=reason)
        return self._execute(step, min(step.limit, left))

    def _execute(self, step: Step, seconds: float) -> Outcome:
        command = list(step.command)
        if step.budgeted:
            command += ["--seconds", f"{seconds:.0f}"]
            seconds += GRACE_SECONDS
        log, output = self._logs / f"{step.name}.log", self._logs / f"{step.name}.out"
        began = time.monotonic()
        with log.open("wb") as errors, output.open("wb") as answers:
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                env={**os.environ, **step.environment},
                stdin=subprocess.DEVNULL,
                stdout=answers,
                stderr=errors,
                start_new_session=True,
            )
            ended = _wait(process, seconds)
        took = time.monotonic() - began
        answer = output.read_text(errors="replace")
        output.unlink()
        with log.open("a") as errors_again:
            errors_again.write(answer)
        result = last_json(answer)
        outcome = Outcome(step.name, step.title, "failed", seconds=took, result=result, log=log.name)
        if not ended:
            return replace(outcome, reason=f"ended after {seconds:.0f} s, its limit")
        if process.returncode != 0:
            reason = f"exit status {process.returncode}; the end of {log.name}:\n{_tail(log)}"
            return replace(outcome, reason=reason)
        line = str(result.get("line", "")) if result else last_line(answer)
        return replace(outcome, status="passed", reason=line)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the process ended by itself in time; if not, it and its children are ended."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(process.pid, number)
            try:
                process.wait(GRACE_SECONDS)
                break
            except subprocess.TimeoutExpired:
                continue
        return False
    return True


def last_json(text: str) -> dict[str, Any]:
    """The last line that is a JSON object, or nothing: a step that breaks off keeps what it told before."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(found, dict):
                return found
    return {}


def last_line(text: str) -> str:
    """The last line that is not empty."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip(" =") if lines else ""


def _tail(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-LINES_OF_A_FAILURE:])
