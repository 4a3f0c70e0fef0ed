"""Start runs as separate processes, under a memory cap if there is one, and return their exit state."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from demo_long.settings import LongSettings
from zero_ext.monitor import MemoryCap

EXAMPLES = Path(__file__).resolve().parent.parent
OUT_OF_MEMORY = 3  # exit status of demo_long.train, not imported because it loads transformers
LAST_WORDS = 3


@dataclass(frozen=True)
class Ending:
    """Exit state of a run: its status as in subprocess, the number of OOM kills, and its last output."""

    status: int
    kills: int | None
    last_words: list[str]

    @property
    def trained(self) -> bool:
        return self.status == 0

    @property
    def out_of_memory(self) -> bool:
        """True if the cap ended the run: an allocation failed, or the kernel killed the process."""
        return self.status == OUT_OF_MEMORY or (self.status == -signal.SIGKILL and self.kills != 0)

    def __str__(self) -> str:
        if self.trained:
            return "trained"
        return "out of memory" if self.out_of_memory else f"failed, status {self.status}"


def run(name: str, folder: Path, settings: LongSettings, cap: MemoryCap | None = None) -> Ending:
    """Run `demo_long.train` for the run `name` and wait.

    Raises:
        subprocess.TimeoutExpired: The run took longer than `settings.time_limit_seconds`.
    """
    paths = [str(EXAMPLES), str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    log, complaints = folder / f"{name}.log", folder / f"{name}-stderr.log"
    with log.open("wb") as output, complaints.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "demo_long.train", str(folder), name],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            preexec_fn=cap.enter if cap is not None else None,
        )
        try:
            status = process.wait(settings.time_limit_seconds)
        finally:
            process.kill()  # no effect if the process has exited
            process.wait()
    lines = _lines(log) or _lines(complaints)
    return Ending(status, cap.kills() if cap is not None else 0, lines[-LAST_WORDS:])


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
