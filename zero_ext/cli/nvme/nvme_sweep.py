"""The sweep over engine settings for a device: each is measured in turn against plain system calls
and fio.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median

import torch

from zero_ext import ops
from zero_ext.cli.nvme.fio import FioJob, fio_installed, run_fio
from zero_ext.cli.nvme.nvme_run import (
    PLAIN_BLOCK,
    Cost,
    DeviceFile,
    Setting,
    buffer_bytes,
    engine_pass,
    plain_pass,
)
from zero_ext.config import load_config
from zero_ext.offload import NvmeStore
from zero_ext.plan.parse_sizes import size_text

_PAGE = 4096
_SPARE_BYTES = 64 << 20
_TIE = 0.98  # a setting this close to the fastest is as fast: repeats of one setting differ by more
FIO_DEPTH = 32


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
            load_config({"aio": setting.section()})
        settings = [setting for setting in every if setting.in_flight_bytes <= nbytes]
        if not settings:
            least = min((setting.in_flight_bytes for setting in every), default=0)
            raise ValueError(
                f"--size: expected at least {size_text(least)}, which block size x depth x I/O threads "
                "keep in "
                f"flight, got {size_text(nbytes)}. Raise --size or lower them."
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


def engine_contender(file: DeviceFile, setting: Setting, memory: torch.Tensor) -> Contender:
    """Our engine with one setting."""
    name = (
        f"{setting.backend} {size_text(setting.block_bytes)} x {setting.queue_depth} x {setting.io_threads}"
    )
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
                "Free some, "
                "or choose a smaller --size or another path."
            )
        store.reserve(nbytes)
        device = store.facts().devices[0]
        yield DeviceFile(device.path, nbytes, not device.why_not_direct), device.why_not_direct
