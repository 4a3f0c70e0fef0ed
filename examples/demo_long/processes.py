"""Starts the runs as processes of their own, under a cap where there is one, and says how they ended."""

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
OUT_OF_MEMORY = 3  # the exit status of demo_long.train, which this light-weight side does not import
LAST_WORDS = 3


@dataclass(frozen=True)
class Ending:
    """How a run ended: exit status as subprocess tells it, what the kernel did, and what it wrote last."""

    status: int
    kills: int | None
    last_words: list[str]

    @property
    def trained(self) -> bool:
        return self.status == 0

    @property
    def out_of_memory(self) -> bool:
        """Whether it was the cap that ended the run: memory refused, or killed by the kernel for it."""
        return self.status == OUT_OF_MEMORY or (self.status == -signal.SIGKILL and self.kills != 0)

    def __str__(self) -> str:
        if self.trained:
            return "trained"
        return "out of memory" if self.out_of_memory else f"failed, status {self.status}"


def run(name: str, folder: Path, settings: LongSettings, cap: MemoryCap | None = None) -> Ending:
    """Runs `demo_long.train` for the run `name` and waits.

    Raises subprocess.TimeoutExpired after `settings.time_limit_seconds`.
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
            process.kill()  # nothing to one that has ended
            process.wait()
    lines = _lines(log) or _lines(complaints)
    return Ending(status, cap.kills() if cap is not None else 0, lines[-LAST_WORDS:])


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
