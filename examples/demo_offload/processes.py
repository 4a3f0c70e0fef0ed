"""Start runs as separate processes, under a memory cap if there is one, and return their exit state."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from demo_offload.settings import OffloadSettings
from demo_offload.timeline import Sample, read_timeline
from zero_ext.monitor import MemoryCap

EXAMPLES = Path(__file__).resolve().parent.parent
OUT_OF_MEMORY = 3  # exit status of demo_offload.train, not imported because it loads transformers
LAST_WORDS = 4


@dataclass(frozen=True)
class Ending:
    """Exit state of a run: its status as in subprocess, the number of OOM kills, and its last output."""

    status: int
    kills: int | None
    last_words: list[str]
    timeline: list[Sample]

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
        if self.out_of_memory:
            return "out of memory"
        return f"failed, status {self.status}"


def run(
    name: str, folder: Path, settings: OffloadSettings, nvme: Path | None = None, cap: MemoryCap | None = None
) -> Ending:
    """Run `demo_offload.train` for the run `name` and wait. An interruption of the wait also kills the run.

    Raises:
        subprocess.TimeoutExpired: The run took longer than `settings.time_limit_seconds`.
    """
    paths = [str(EXAMPLES), str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads are slow when other processes use the cores
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    command = [sys.executable, "-m", "demo_offload.train", str(folder), name]
    command += [str(nvme)] if nvme is not None else []
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only this process, which then kills the run
            preexec_fn=cap.enter if cap is not None else None,
        )
        try:
            status = process.wait(settings.time_limit_seconds)
        finally:
            process.kill()  # no effect after exit. The caller removes files left on NVMe.
            process.wait()
    timeline = folder / f"{name}-timeline.csv"
    return Ending(
        status,
        cap.kills() if cap is not None else 0,
        [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-LAST_WORDS:],
        read_timeline(timeline) if timeline.exists() else [],
    )
