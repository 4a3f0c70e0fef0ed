"""fio (Axboe's I/O tester), where it is installed: the same transfers by somebody else's program."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

FIO_ENGINES = {"io_uring": "io_uring", "libaio": "libaio", "threads": "psync"}


@dataclass(frozen=True)
class FioJob:
    """One sequential pass over the first ``nbytes`` of a file that exists.

    ``backend`` is ours; "threads" becomes as many synchronous threads as the queue is deep, which go through
    the file side by side, block by block, as ours do. Further ``io_threads`` of the other backends have each
    a part of the file. ``huge_pages`` asks glibc for them, for fio's buffers: devices take longer contiguous
    chunks then, as they do from ours.
    """

    path: Path
    backend: str
    block_bytes: int
    queue_depth: int
    io_threads: int
    nbytes: int
    writing: bool
    direct: bool
    huge_pages: bool = True

    def command(self) -> list[str]:
        """Return the call of fio."""
        synchronous = self.backend == "threads"
        jobs = self.queue_depth * self.io_threads if synchronous else self.io_threads
        segment_bytes = self.nbytes // jobs // self.block_bytes * self.block_bytes
        if segment_bytes == 0:
            raise ValueError(
                f"--size: expected at least {jobs * self.block_bytes} bytes for {jobs} jobs with blocks of "
                f"{self.block_bytes} bytes, got {self.nbytes}. Raise --size."
            )
        direction = "write" if self.writing else "read"
        others = (jobs - 1) * self.block_bytes if synchronous else 0
        options = {
            "name": "zero_ext",
            "filename": str(self.path).replace(":", "\\:"),
            "rw": f"{direction}:{others}" if others else direction,  # skipped after each block
            "ioengine": FIO_ENGINES[self.backend],
            "bs": self.block_bytes,
            "iodepth": 1 if synchronous else self.queue_depth,
            "numjobs": jobs,
            "size": self.nbytes - others if synchronous else segment_bytes,
            "io_size": segment_bytes,
            "offset_increment": self.block_bytes if synchronous else segment_bytes,
            "direct": int(self.direct),
            "end_fsync": int(self.writing and not self.direct),
            "fallocate": "none",
            "output-format": "json",
        }
        if self.huge_pages:
            options["iomem_align"] = "2M"  # else a thread's single block lies across small pages
        return [
            "fio",
            *(f"--{name}={value}" for name, value in options.items()),
            "--thread",
            "--group_reporting",
        ]


@dataclass(frozen=True)
class FioResult:
    """The figures of fio: bytes, wall and processor seconds, the 99th percentile of a block's latency."""

    nbytes: int
    seconds: float
    processor_seconds: float
    p99_seconds: float


def fio_installed() -> bool:
    """Return whether the program is on PATH."""
    return shutil.which("fio") is not None


def run_fio(job: FioJob) -> FioResult:
    """Run fio once. RuntimeError with its words if it fails."""
    tunables = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if job.huge_pages else {}
    done = subprocess.run(
        job.command(),
        env={**os.environ, **tunables},
        capture_output=True,
        text=True,
        check=False,
        cwd=job.path.parent,
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"fio: exit status {done.returncode}: {(done.stderr or done.stdout)[-1000:].strip()}. Run it "
            "by hand, or remove it from PATH to measure without it."
        )
    return parse_fio(done.stdout)


def parse_fio(text: str) -> FioResult:
    """Return the figures in fio's JSON, which warnings may precede. RuntimeError if they are not there."""
    try:
        job = json.loads(text[text.index("{") :])["jobs"][0]
        side = job["read"] if job["read"]["io_bytes"] else job["write"]
        share = (job["usr_cpu"] + job["sys_cpu"]) / 100
        return FioResult(
            nbytes=side["io_bytes"],
            seconds=side["runtime"] / 1e3,
            processor_seconds=share * job["job_runtime"] / 1e3,
            p99_seconds=side["clat_ns"]["percentile"]["99.000000"] / 1e9,
        )
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise RuntimeError(
            f"fio: expected its JSON, got {text[:300]!r} ({error!r}). Install fio 3, or remove "
            "this one from PATH."
        ) from error
