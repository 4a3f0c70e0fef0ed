"""Runs steps, each as a process of its own, within what is left of the time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from scripts.gpu_check.step import Outcome, Step

# A step that keeps to its own time is given this much longer to write what it has and to remove its files.
GRACE_SECONDS = 10.0
LINES_OF_A_FAILURE = 12
# Bytes that are saved of a step's output: its beginning, where the cause often is, and its end.
SAVED_OUTPUT_BYTES = 256 << 10


class Runner:
    """Steps within a deadline.

    Args:
        folder: the source tree, where the programs start.
        logs: folder for the output of every step.
        seconds: time for all of them.
        print_line: prints a line on the terminal.
        judged: figures that miss their bar are reported as missed.
        jobs: how many steps may run at a time, those apart that must be alone.
        record: takes the outcomes so far, in order, after every step.
    """

    def __init__(
        self,
        folder: Path,
        logs: Path,
        seconds: float,
        print_line: Callable[[str], None],
        *,
        judged: bool = True,
        jobs: int = 1,
        record: Callable[[Sequence[Outcome]], None] = lambda outcomes: None,
    ) -> None:
        self._folder = folder
        self._logs = logs
        self._began = time.monotonic()
        self._deadline = self._began + seconds
        self._print_line = print_line
        self._judged = judged
        self._jobs = jobs
        self._record = record
        self._lock = threading.Lock()

    def run(self, steps: Sequence[Step]) -> list[Outcome]:
        """The outcome of every step, in order; a step that fails does not stop the others."""
        outcomes: dict[str, Outcome] = {}

        def one(step: Step) -> None:
            outcome = self._outcome(step, outcomes)
            with self._lock:
                outcomes[step.name] = outcome
                for line in self._lines(outcome):
                    self._print_line(line)
                self._record([outcomes[each.name] for each in steps if each.name in outcomes])

        for alone, group in groupby(steps, key=lambda step: step.alone):
            with ThreadPoolExecutor(1 if alone else self._jobs) as pool:
                list(pool.map(one, group))
        return [outcomes[step.name] for step in steps]

    def _lines(self, outcome: Outcome) -> Iterator[str]:
        elapsed = f" in {outcome.seconds:.1f} s" if outcome.log else ""
        what = f"{outcome.status}{elapsed}{f': {outcome.reason}' if outcome.reason else ''}"
        yield f"[{time.monotonic() - self._began:6.1f} s] {outcome.name}: {what}"
        for bar in outcome.bars:
            missed = self._judged and not bar.met
            yield f"           {bar.name}: {bar.text()}{'  MISSED' if missed else ''}"
        for what in outcome.left_out:
            yield f"           left out: {what}"

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
        outcome = Outcome(step.name, step.title, "failed", log=log.name)
        with log.open("wb") as errors, output.open("wb") as answers:
            try:
                process = subprocess.Popen(
                    command,
                    cwd=self._folder,
                    env={**os.environ, **step.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=answers,
                    stderr=errors,
                    start_new_session=True,
                )
            except OSError as error:
                return replace(outcome, reason=f"{command[0]} does not start: {error}")
            ended = _wait(process, seconds)
        elapsed = time.monotonic() - began
        answer = output.read_text(errors="replace")
        output.unlink()
        log.write_text(_shortened(log.read_text(errors="replace") + answer))
        result = last_json(answer)
        outcome = replace(outcome, seconds=elapsed, result=result)
        if not ended:
            return replace(outcome, reason=f"ended after {seconds:.0f} s, its limit")
        if process.returncode != 0:
            reason = f"{_how_it_ended(process.returncode)}; the end of {log.name}:\n{_tail(log)}"
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


def _how_it_ended(status: int) -> str:
    return f"exit status {status}" if status > 0 else f"ended by {signal.Signals(-status).name}"


def last_json(text: str) -> dict[str, Any]:
    """The last line that is a JSON object, or nothing: a step that breaks off keeps its earlier output."""
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


def _shortened(text: str) -> str:
    """A text of at most about SAVED_OUTPUT_BYTES characters, with a line where its middle was."""
    half = SAVED_OUTPUT_BYTES // 2
    if len(text) <= SAVED_OUTPUT_BYTES:
        return text
    return f"{text[:half]}\n... {len(text) - SAVED_OUTPUT_BYTES:,} characters left out ...\n{text[-half:]}"


def _tail(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-LINES_OF_A_FAILURE:])
