"""What a run held over time: the process by the kernel's count, model state by tier."""

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
    """One moment of a run.

    Attributes:
        seconds: since the run began to build its model.
        step: the optimizer step it is in, 0 before the first.
        resident, data: bytes of the process in memory, and of private writable memory it has mapped.
        device, host: bytes of model state and staging in those tiers, by the program's own count.
        nvme: bytes of the files in the NVMe folder, by the file system's count.
    """

    seconds: float
    step: int
    resident: int
    data: int
    device: int
    host: int
    nvme: int


def process_memory() -> tuple[int, int]:
    """Bytes of this process: resident, and private writable."""
    pages = Path("/proc/self/statm").read_text().split()
    size = os.sysconf("SC_PAGE_SIZE")
    return int(pages[1]) * size, int(pages[5]) * size


class Recorder:
    """Writes a `Sample` every `interval` seconds into a CSV file, line by line: a killed run leaves them too.

    The training thread tells `step` and the bytes of `device` and `host`; a thread of the recorder's own
    takes the rest.
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
    """The samples of a run; the line that a killed run was writing is left out if it is not whole."""
    lines = path.read_text().split("\n")[1:-1]
    return [
        Sample(float(seconds), *map(int, counts))
        for seconds, *counts in csv.reader(line for line in lines if line.strip())
    ]
