"""The sweep over engine settings for a device, each measured in turn against plain system calls and fio."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from zero_ext import ops
from zero_ext.checkpoint.files import raw_view
from zero_ext.config import ZeroConfig
from zero_ext.offload import NvmeStore
from zero_ext.plan.parse_sizes import size_text

_PAGE = 4096
_SPARE_BYTES = 64 << 20
_TIE = 0.98  # a setting this close to the fastest is as fast: repeats of one setting differ by more
FIO_DEPTH = 32
_BUFFERS = 4
_MIN_BUFFER_BYTES = 16 << 20
PLAIN_BLOCK = 1 << 20
_HANDLE = 0x7A65_726F
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


@dataclass(frozen=True)
class Setting:
    """An ``aio`` section: backend, bytes per block, blocks in flight per thread, I/O threads."""

    backend: str
    block_bytes: int
    queue_depth: int
    io_threads: int

    @property
    def in_flight_bytes(self) -> int:
        """Most bytes under way simultaneously."""
        return self.block_bytes * self.queue_depth * self.io_threads

    def section(self) -> dict[str, object]:
        """Return the section as the configuration spells it."""
        return {
            "backend": self.backend,
            "queue_depth": self.queue_depth,
            "block_bytes": self.block_bytes,
            "io_threads": self.io_threads,
        }


@dataclass(frozen=True)
class Cost:
    """Wall and processor seconds of one pass."""

    seconds: float
    processor_seconds: float


@dataclass(frozen=True)
class DeviceFile:
    """The first ``nbytes`` of a file that exists; not ``direct`` means through the page cache."""

    path: Path
    nbytes: int
    direct: bool

    def sync(self, drop: bool) -> None:
        """Bring a write in the page cache to the device; ``drop``: the next read comes from there too."""
        if not self.direct:
            with _opened(self.path, os.O_RDWR) as descriptor:
                os.fsync(descriptor)
                if drop:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def buffer_bytes(setting: Setting) -> int:
    """Return the bytes of a pass's four buffers. Three keep the queues full while one is replaced."""
    blocks = -(-max(_MIN_BUFFER_BYTES, -(-setting.in_flight_bytes // (_BUFFERS - 1))) // setting.block_bytes)
    return _BUFFERS * blocks * setting.block_bytes


def engine_pass(file: DeviceFile, setting: Setting, memory: Tensor, writing: bool) -> Cost:
    """Move the file once through the engine; ``memory`` (uint8) has at least :func:`buffer_bytes`.

    RuntimeError if the backend is not available or a transfer fails.
    """
    ops.aio_open(_HANDLE, setting.backend, setting.queue_depth, setting.block_bytes, setting.io_threads)
    try:
        with _measured(file, writing) as costs:
            start, buffer = ops.aio_write_ if writing else ops.aio_read_, buffer_bytes(setting) // _BUFFERS
            for number, offset in enumerate(range(0, file.nbytes, buffer)):
                ticket = number % _BUFFERS
                ops.aio_wait(_HANDLE, ticket)
                length = min(buffer, file.nbytes - offset)
                block = memory[ticket * buffer : ticket * buffer + length]
                start(_HANDLE, ticket, str(file.path), offset, block)
            for ticket in range(_BUFFERS):
                ops.aio_wait(_HANDLE, ticket)
        return costs[0]
    finally:
        ops.aio_close(_HANDLE)


def plain_pass(file: DeviceFile, memory: Tensor, writing: bool) -> Cost:
    """Move the file once with pread or pwrite, 1 MiB at a time in this thread."""
    view = raw_view(memory)[:PLAIN_BLOCK]
    flags = (os.O_WRONLY if writing else os.O_RDONLY) | (os.O_DIRECT if file.direct else 0)
    move = os.pwritev if writing else os.preadv
    with _opened(file.path, flags) as descriptor, _measured(file, writing) as costs:
        offset = 0
        while offset < file.nbytes:
            moved = move(descriptor, [view[: file.nbytes - offset]], offset)
            if moved == 0:
                raise RuntimeError(
                    f"'{file.path}': expected {file.nbytes} bytes, got {offset}: another process has "
                    "shortened it. Run the measurement again."
                )
            offset += moved
    return costs[0]


@contextmanager
def _measured(file: DeviceFile, writing: bool) -> Iterator[list[Cost]]:
    """Yield a list that gets the block's cost when it ends; reads start cold, writes end on the device."""
    costs: list[Cost] = []
    if not writing:
        file.sync(drop=True)
    begin, used = time.perf_counter(), time.process_time()
    yield costs
    if writing:
        file.sync(drop=False)
    costs.append(Cost(time.perf_counter() - begin, time.process_time() - used))


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Grid:
    """The settings to try: the product of the four."""

    backends: tuple[str, ...]
    blocks: tuple[int, ...]
    depths: tuple[int, ...]
    io_threads: tuple[int, ...]

    def settings(self, nbytes: int) -> tuple[list[Setting], list[Setting]]:
        """Return what to measure on a file of ``nbytes``, and what is left out as it never fills its queues.

        ConfigError for a value that no configuration may hold, ValueError if nothing is left.
        """
        every = [
            Setting(*values) for values in product(self.backends, self.blocks, self.depths, self.io_threads)
        ]
        for setting in every:
            ZeroConfig.from_mapping({"aio": setting.section()})
        settings = [setting for setting in every if setting.in_flight_bytes <= nbytes]
        if not settings:
            least = min((setting.in_flight_bytes for setting in every), default=0)
            raise ValueError(
                f"--size: expected at least {size_text(least)}, which block size x depth x I/O threads keep "
                f"in flight, got {size_text(nbytes)}. Raise --size or lower them."
            )
        return settings, [setting for setting in every if setting.in_flight_bytes > nbytes]


@dataclass
class Contender:
    """Something that reads and writes the file; ``setting`` is None where it is not our engine."""

    name: str
    run: Callable[[bool], Cost]
    setting: Setting | None = None
    reads: list[Cost] = field(default_factory=list)
    writes: list[Cost] = field(default_factory=list)

    @property
    def section(self) -> dict[str, object]:
        """The ``aio`` section of the setting, if there is one."""
        return {} if self.setting is None else self.setting.section()

    def seconds(self, writing: bool) -> float:
        """Median of the passes of one direction."""
        return median(cost.seconds for cost in (self.writes if writing else self.reads))

    @property
    def both_seconds(self) -> float:
        """A read and a write of the file: what an optimizer step costs."""
        return self.seconds(False) + self.seconds(True)

    @property
    def processor_seconds(self) -> float:
        """Median processor time of a read plus that of a write."""
        return sum(median(cost.processor_seconds for cost in costs) for costs in (self.reads, self.writes))


@dataclass(frozen=True)
class Sweep:
    """Everything measured on one path; ``why_not_direct`` is empty if the page cache was passed by."""

    path: Path
    nbytes: int
    why_not_direct: str
    engine: list[Contender]
    peers: list[Contender]

    @property
    def best(self) -> Contender:
        """See :func:`best_of`."""
        return best_of(self.engine)


def best_of(contenders: Sequence[Contender]) -> Contender:
    """Return the one to configure: within 2% of the fastest, then the least processor time, then the fewest
    bytes in flight.
    """
    fastest = min(contender.both_seconds for contender in contenders)
    tied = [contender for contender in contenders if contender.both_seconds * _TIE <= fastest]
    return min(
        tied, key=lambda each: (each.processor_seconds, each.setting.in_flight_bytes if each.setting else 0)
    )


def in_turn(contenders: Sequence[Contender], repeats: int, tick: Callable[[str], None]) -> None:
    """One write and one read of each contender a repeat, forwards and backwards alternately.

    ``tick`` is called with the contender's name before each pass.
    """
    for repeat in range(repeats):
        for contender in contenders if repeat % 2 == 0 else contenders[::-1]:
            for writing, costs in ((True, contender.writes), (False, contender.reads)):
                tick(contender.name)
                costs.append(contender.run(writing))


def sweep_device(
    path: Path, nbytes: int, settings: Sequence[Setting], repeats: int, tick: Callable[[str], None]
) -> Sweep:
    """Measure every setting on a file of ``nbytes`` in the directory ``path``, removed whatever happens.

    The file holds random bytes before anything is measured. RuntimeError: the path is missing, read-only or
    short of space, or a transfer fails.
    """
    with device_file(path, nbytes) as (file, why_not_direct):
        memory = ops.host_buffer(max(PLAIN_BLOCK, *(buffer_bytes(setting) for setting in settings)))
        memory.view(torch.int64).random_()  # zeros are not what devices that compress get from training
        plain = Contender("pread/pwrite", lambda writing: plain_pass(file, memory, writing))
        engine = [engine_contender(file, setting, memory) for setting in settings]
        peers = [plain, *fio_contenders(file, settings)]
        plain.run(True)
        in_turn([*peers, *engine], repeats, tick)
        return Sweep(path, nbytes, why_not_direct, engine, peers)


def engine_contender(file: DeviceFile, setting: Setting, memory: Tensor) -> Contender:
    """Our engine with one setting."""
    block = size_text(setting.block_bytes)
    name = f"{setting.backend} {block} x {setting.queue_depth} x {setting.io_threads}"
    return Contender(name, lambda writing: engine_pass(file, setting, memory, writing), setting)


def fio_contenders(file: DeviceFile, settings: Sequence[Setting]) -> list[Contender]:
    """fio with 1 MiB blocks, 32 in flight, through the first backend of the sweep, if it is installed."""
    if not fio_installed() or file.nbytes < PLAIN_BLOCK * FIO_DEPTH:
        return []
    backend = settings[0].backend

    def run(writing: bool) -> Cost:
        job = FioJob(file.path, backend, PLAIN_BLOCK, FIO_DEPTH, 1, file.nbytes, writing, file.direct)
        result = run_fio(job)
        scale = file.nbytes / result.nbytes
        return Cost(result.seconds * scale, result.processor_seconds * scale)

    return [Contender(f"fio {backend} {size_text(PLAIN_BLOCK)} x {FIO_DEPTH}", run)]


@contextmanager
def device_file(path: Path, nbytes: int) -> Iterator[tuple[DeviceFile, str]]:
    """Yield a private file of ``nbytes``, allocated and written, and why it is not direct, if it is not.

    It is in a store's run directory, so even after SIGKILL the next store or sweep on the path removes it.
    RuntimeError naming the path if it is missing, read-only or short of space.
    """
    if nbytes < _PAGE or nbytes % _PAGE:
        raise ValueError(f"--size: expected a multiple of {_PAGE} bytes, got {nbytes}. Round it up.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the caller shows the reason
        store = NvmeStore([path])
    with store:
        free = shutil.disk_usage(path).free
        if free < nbytes + _SPARE_BYTES:
            raise RuntimeError(
                f"'{path}': expected {nbytes:,} bytes free and {_SPARE_BYTES:,} to spare, got {free:,}. "
                "Free some, or choose a smaller --size or another path."
            )
        store.reserve(nbytes)
        device = store.facts().devices[0]
        yield DeviceFile(device.path, nbytes, not device.why_not_direct), device.why_not_direct
