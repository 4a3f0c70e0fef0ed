"""Runs compiler calls side by side, with a line of progress, a log, and an end at the first failure."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_POLL_SECONDS = 0.05
_LINES_OF_AN_ERROR = 20
_COLUMNS = 80  # of a terminal that does not say


@dataclass(frozen=True)
class CompilerCall:
    """One call, and the name of what it makes, as the user is shown it."""

    label: str
    command: list[str]


@dataclass
class _Running:
    call: CompilerCall
    process: subprocess.Popen[bytes]
    output: IO[bytes]


class Progress:
    """The output of a build on stderr: its start and its end, and on a terminal how far it is."""

    def __init__(self, module: str, count: int) -> None:
        self._module = module
        self._count = count
        self._started = time.monotonic()
        self._shown_at = 0.0
        self._on_terminal = sys.stderr.isatty()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def start(self, folder: Path) -> None:
        print(
            f"zero_ext: building {self._module} ({self._count} files, once for this torch and these sources) "
            f"in {folder}",
            file=sys.stderr,
            flush=True,
        )

    def show(self, done: int, labels: Sequence[str]) -> None:
        """Rewrite the terminal's line, at most twice per second."""
        now = time.monotonic()
        if not self._on_terminal or now - self._shown_at < 0.5:
            return
        self._shown_at = now
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or _COLUMNS
        text = f"zero_ext: {done} of {self._count} files, {self.seconds:.0f} s: {', '.join(labels)}"
        print(f"\r\x1b[K{text[: columns - 1]}", end="", file=sys.stderr, flush=True)

    def end(self, outcome: str) -> None:
        clear = "\r\x1b[K" if self._on_terminal else ""
        print(
            f"{clear}zero_ext: {outcome} {self._module} in {self.seconds:.1f} s", file=sys.stderr, flush=True
        )


def run_calls(
    calls: Sequence[CompilerCall], folder: Path, log: IO[bytes], progress: Progress, done: int = 0
) -> None:
    """Run all calls in `folder`, as many at a time as there are cores, or ``$MAX_JOBS``.

    Every call and what it printed is added to `log`. `done` files of the build were made before.

    Raises:
        RuntimeError: a call failed; the others have been ended. The error holds its last lines.
    """
    limit = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))
    waiting = deque(calls)
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < max(limit, 1):
                running.append(_start(waiting.popleft(), folder))
            progress.show(done, [each.call.label for each in running])
            time.sleep(_POLL_SECONDS)
            for each in [each for each in running if each.process.poll() is not None]:
                running.remove(each)
                _finish(each, log)
                done += 1
    finally:
        for each in running:
            # nvcc has children; each call leads a group of its own, which ends with it.
            if each.process.poll() is None:
                os.killpg(each.process.pid, signal.SIGKILL)
                each.process.wait()
            each.output.close()


def _start(call: CompilerCall, folder: Path) -> _Running:
    output = tempfile.TemporaryFile()  # noqa: SIM115  closed when the call has ended
    process = subprocess.Popen(
        call.command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    return _Running(call, process, output)


def _finish(running: _Running, log: IO[bytes]) -> None:
    with running.output as file:
        file.seek(0)
        output = file.read()
    status = running.process.returncode
    log.write(f"$ {shlex.join(running.call.command)}\n".encode() + output + f"[status {status}]\n".encode())
    log.flush()
    if status != 0:
        lines = output.decode(errors="replace").rstrip().splitlines()
        raise RuntimeError(
            f"{running.call.label}: it failed with status {status}. Read the last of its {len(lines)} "
            "lines:\n" + "\n".join(lines[-_LINES_OF_AN_ERROR:])
        )
