"""A trial as a process of its own: started, watched, ended in time, with its outcome read from what
it left.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zero_ext.config import ZeroConfig
from zero_ext.config.config_errors import ConfigError
from zero_ext.config.json_file import read_json_object
from zero_ext.plan.tune import trial

Fate = Literal["measured", "out of memory", "timed out", "failed"]

_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|MemoryError|cannot allocate memory|SIGKILL|exitcode\s*:\s*-9",
    re.IGNORECASE,
)
_POLL_SECONDS = 0.02
_GRACE_SECONDS = 5.0  # after the result, for the script to end by itself
_TAIL_BYTES = 65536


@dataclass(frozen=True)
class Launch:
    """The start of the script: ``script`` with ``arguments`` on ``ranks`` processes, each trial for at most
    ``timeout`` seconds. It measures ``steps`` steps."""

    script: Path
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    steps: int = 5
    timeout: float = 300.0

    @property
    def command(self) -> list[str]:
        """Return what is run."""
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        return [sys.executable, *(several if self.ranks > 1 else []), str(self.script), *self.arguments]


@dataclass(frozen=True)
class TrialOutcome:
    """The outcome of a trial: samples per second over all ranks if it was measured, else 0 and the reason."""

    fate: Fate
    samples_per_second: float = 0.0
    reason: str = ""
    seconds: float = 0.0


def run_trial(launch: Launch, config: ZeroConfig) -> TrialOutcome:
    """Run the script once with ``config``. Whatever happens to it is an outcome, never an exception; only
    what prevents starting it raises OSError."""
    with tempfile.TemporaryDirectory(prefix="zero-ext-trial-") as name:
        folder = Path(name)
        path, result, log = folder / "config.json", folder / "result.json", folder / "log"
        path.write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
        environment = {
            **os.environ,
            trial.CONFIG: str(path),
            trial.STEPS: str(launch.steps),
            trial.RESULT: str(result),
        }
        begin = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                launch.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        try:
            _die_first(process.pid)
            timely = _wait(process, result, begin + launch.timeout)
        finally:
            _end(process)
        return _outcome(process.returncode, timely, result, log, time.monotonic() - begin)


def _die_first(pid: int) -> None:
    """If memory gets short, the kernel shall end the trial and not the tuner or anything else."""
    with suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000", encoding="ascii")


def _wait(process: subprocess.Popen[bytes], result: Path, deadline: float) -> bool:
    """Until the process ends, or a while after it has left its result; False at the deadline."""
    while process.poll() is None:
        now = time.monotonic()
        if now >= deadline:
            return result.exists()
        if result.exists():
            deadline = min(deadline, now + _GRACE_SECONDS)
        time.sleep(_POLL_SECONDS)
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """End whatever is left of the process and those it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _outcome(status: int, timely: bool, result: Path, log: Path, seconds: float) -> TrialOutcome:
    if result.exists():
        rate = _rate(result)
        if rate is None:
            return TrialOutcome("failed", reason="it left a result that cannot be read", seconds=seconds)
        return TrialOutcome("measured", rate, seconds=seconds)
    if not timely:
        return TrialOutcome("timed out", reason=f"no result within {seconds:.0f} s", seconds=seconds)
    tail = _tail(log)
    if status in (-signal.SIGKILL, 128 + signal.SIGKILL) or _OUT_OF_MEMORY.search(tail):
        return TrialOutcome("out of memory", reason=_last_line(tail) or "killed", seconds=seconds)
    if status == 0:
        reason = "it ended without a result: does it call Trial.steps?"
    else:
        reason = _last_line(tail) or f"exit status {status}"
    return TrialOutcome("failed", reason=reason, seconds=seconds)


def _rate(result: Path) -> float | None:
    """Return the rate in a result file; None if it is not one."""
    try:
        rate = read_json_object(result).get("samples_per_second")
    except ConfigError:
        return None
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not math.isfinite(rate) or rate <= 0:
        return None
    return float(rate)


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return file.read().decode("utf-8", "replace")


def _last_line(text: str) -> str:
    lines: Sequence[str] = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or [""])[-1][:200]
