"""Memory of a run over time: the process as counted by the kernel, and model state by tier."""

from __future__ import annotations

import csv
import os
import threading
import time
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from zero_ext.monitor import file_bytes

TIERS = ("device", "host", "nvme")


@dataclass(frozen=True)
class Sample:
    """Memory of a run at one point in time.

    Attributes:
        seconds: Time since the run began to build its model.
        step: The current optimizer step, 0 before the first.
        resident, data: Bytes of resident memory, and of mapped private writable memory.
        device, host: Bytes of model state and staging in these tiers, as counted by the engine.
        nvme: Bytes of the files in the NVMe folder, as reported by the file system.
    """

    seconds: float
    step: int
    resident: int
    data: int
    device: int
    host: int
    nvme: int


def process_memory() -> tuple[int, int]:
    """Return the bytes of resident and of private writable memory of this process."""
    pages = Path("/proc/self/statm").read_text().split()
    size = os.sysconf("SC_PAGE_SIZE")
    return int(pages[1]) * size, int(pages[5]) * size


class Recorder:
    """Background thread that writes a `Sample` to a CSV file every `interval` seconds.

    The file is flushed after every line, so that a killed run leaves its samples. The training thread sets
    `step`, `device` and `host`. The background thread measures the rest.
    """

    def __init__(self, path: Path, nvme: Path | None, interval: float) -> None:
        self.step = self.device = self.host = 0
        self._path, self._nvme, self._interval = path, nvme, interval
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        began = time.perf_counter()
        with self._path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(field.name for field in fields(Sample))
            while True:
                last = self._ended.is_set()
                seconds = round(time.perf_counter() - began, 3)
                memory = process_memory()
                stored = file_bytes(self._nvme) if self._nvme is not None else 0
                sample = Sample(seconds, self.step, *memory, self.device, self.host, stored)
                rows.writerow(astuple(sample))
                file.flush()
                if last:
                    return
                self._ended.wait(self._interval)


def read_timeline(path: Path) -> list[Sample]:
    """Return the samples of a run, without an incomplete last line of a killed run."""
    lines = path.read_text().split("\n")[1:-1]
    return [
        Sample(float(seconds), *map(int, counts))
        for seconds, *counts in csv.reader(line for line in lines if line.strip())
    ]
