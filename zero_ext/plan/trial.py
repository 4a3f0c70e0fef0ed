"""A trial of ``zero-ext tune``: the lines for a training script, and the process that runs it."""

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from zero_ext.config import ZeroConfig, load_config
from zero_ext.config.config_errors import ConfigError
from zero_ext.config.sources.config_source import VARIABLE
from zero_ext.config.sources.json_file import read_json_object

CONFIG = "ZERO_EXT_TRIAL_CONFIG"
STEPS = "ZERO_EXT_TRIAL_STEPS"
RESULT = "ZERO_EXT_TRIAL_RESULT"
WARM_UP_STEPS = 2

Item = TypeVar("Item")


@dataclass(frozen=True)
class Trial:
    """The configuration to train with, and the steps that are measured.

    Outside `zero-ext tune` it is the script's own configuration and measures nothing.

    Attributes:
        config: of the trial, else what the script gave.
        measured_steps: steps that are timed, after two that are not; 0 outside a trial.
        result: where rank 0 writes what it measured.

    Examples:
        >>> from zero_ext.plan import Trial
        >>> trial = Trial.current({"stage": 2})
        >>> trial.config.stage, trial.measured_steps
        (2, 0)
    """

    config: ZeroConfig
    measured_steps: int = 0
    result: Path | None = None

    @classmethod
    def current(cls, config: ZeroConfig | Mapping[str, Any] | str | Path | None = None) -> Trial:
        """Return the trial that this process is, by its environment variables; else one with `config`.

        Args:
            config: as for [`load_config`][zero_ext.load_config].

        Returns:
            The trial.

        Raises:
            ConfigError: the configuration cannot be used.
            ValueError: the number of steps is none.
        """
        path, steps = os.environ.get(CONFIG), os.environ.get(STEPS, "")
        if path is None:
            return cls(load_config(config))
        if not steps.isdecimal() or int(steps) < 1:
            raise ValueError(
                f"{STEPS}: expected an integer of at least 1, got {steps!r}. Let zero-ext tune set it."
            )
        result = os.environ.get(RESULT)
        return cls(
            ZeroConfig.from_mapping(read_json_object(path)), int(steps), Path(result) if result else None
        )

    def steps(self, batches: Iterable[Item], samples: int | None = None) -> Iterator[Item]:
        """Yield `batches`, one per micro-batch; in a trial as many as it takes, timed, and no more.

        Args:
            batches: of the script's loader.
            samples: samples of one of them on one rank; default the configuration's micro-batch size.

        Yields:
            The batches.

        Raises:
            RuntimeError: they end before the trial does.
        """
        if not self.measured_steps:
            yield from batches
            return
        of_step = self.config.batch.gradient_accumulation_steps
        warm_up, wanted = WARM_UP_STEPS * of_step, self.measured_steps * of_step
        begin, count = 0.0, 0
        for item in batches:
            if count == warm_up:
                begin = _now()
            if count == warm_up + wanted:
                break
            count += 1
            yield item
        if count < warm_up + wanted:
            raise RuntimeError(
                f"micro-batches of a trial: expected {warm_up + wanted}, got {count} before the script's "
                "loader ended. Make the loader yield more, or lower --steps."
            )
        self._write(wanted * (samples or self.config.batch.micro_batch_size or 1), _now() - begin)

    def _write(self, samples: int, seconds: float) -> None:
        if self.result is not None and os.environ.get("RANK", "0") == "0":
            ranks = int(os.environ.get("WORLD_SIZE", "1"))
            found = {"samples_per_second": samples * ranks / seconds, "seconds": seconds}
            partial = self.result.with_suffix(".part")
            partial.write_text(json.dumps(found), encoding="utf-8")
            partial.rename(self.result)


def _now() -> float:
    """Return the time at which the accelerator, if there is one, has done what it was given."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


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
            **{name: value for name, value in os.environ.items() if name != VARIABLE},  # part of the base
            CONFIG: str(path),
            STEPS: str(launch.steps),
            RESULT: str(result),
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
