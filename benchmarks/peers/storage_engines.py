"""Who moves a whole file: our engine per backend, fio with the same engine, DeepSpeed's aio handle, pread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from zero_ext import ops
from zero_ext.cli.nvme_sweep import (
    FIO_ENGINES,
    Cost,
    DeviceFile,
    FioJob,
    Setting,
    engine_pass,
    plain_pass,
    run_fio,
)

HANDLE = 0x6265_6E63


@dataclass
class Mover:
    """A contender: `run(writing)` moves the file once; latencies are of single blocks, in seconds, and come
    with it or from `blocks(writing)`, a pass for them alone. `beside` has what ours took right before or
    after each of this one's passes."""

    name: str
    run: Callable[[bool], tuple[Cost, float | None]]
    backend: str
    blocks: Callable[[bool], float] | None = None
    costs: dict[bool, list[Cost]] = field(default_factory=lambda: {False: [], True: []})
    p99: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    beside: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})

    def turn(self, writing: bool) -> None:
        """One measured pass."""
        cost, p99 = self.run(writing)
        self.costs[writing].append(cost)
        if p99 is not None:
            self.p99[writing].append(p99)

    def time_blocks(self) -> None:
        """One pass of each direction for the latencies, where they need one."""
        if self.blocks is not None:
            for writing in (True, False):
                self.p99[writing].append(self.blocks(writing))

    def seconds(self, writing: bool) -> list[float]:
        """Wall seconds of every pass of one direction."""
        return [cost.seconds for cost in self.costs[writing]]


def percentile_99(latencies: list[float]) -> float:
    """The least latency that 99% do not exceed. ValueError for none."""
    if not latencies:
        raise ValueError("the 99th percentile of no latencies")
    return sorted(latencies)[-(-99 * len(latencies) // 100) - 1]


def block_latencies(file: DeviceFile, setting: Setting, memory: Tensor, writing: bool) -> list[float]:
    """Seconds of each block of one pass with the queue kept full, a transfer a block, waited for in order.

    A block that overtakes older ones is noticed late, so these are upper bounds.
    """
    ops.aio_open(HANDLE, setting.backend, setting.queue_depth, setting.block_bytes, setting.io_threads)
    move = ops.aio_write_ if writing else ops.aio_read_
    block, window = setting.block_bytes, setting.queue_depth * setting.io_threads
    started: dict[int, float] = {}
    latencies: list[float] = []

    def finish(slot: int) -> None:
        ops.aio_wait(HANDLE, slot)
        latencies.append(time.perf_counter() - started.pop(slot))

    try:
        for number in range(file.nbytes // block):
            slot = number % window
            if slot in started:
                finish(slot)
            started[slot] = time.perf_counter()
            move(HANDLE, slot, str(file.path), number * block, memory[slot * block : (slot + 1) * block])
        for slot in list(started):
            finish(slot)
        return latencies
    finally:
        ops.aio_close(HANDLE)


def own_engine(file: DeviceFile, setting: Setting, memory: Tensor) -> Mover:
    """zero_ext's engine; latencies come from a pass of their own."""

    return Mover(
        f"zero_ext, {setting.backend}",
        lambda writing: (engine_pass(file, setting, memory, writing), None),
        setting.backend,
        lambda writing: percentile_99(block_latencies(file, setting, memory, writing)),
    )


def fio_engine(file: DeviceFile, setting: Setting, huge_pages: bool) -> Mover:
    """fio with the same engine, block size and depth, as it comes or with its buffers on huge pages, as ours
    are; its own clock, without its start."""

    def run(writing: bool) -> tuple[Cost, float | None]:
        options = {**vars(setting), "huge_pages": huge_pages}
        job = FioJob(file.path, nbytes=file.nbytes, writing=writing, direct=file.direct, **options)
        result = run_fio(job)
        scale = file.nbytes / result.nbytes
        return Cost(result.seconds * scale, result.processor_seconds * scale), result.p99_seconds

    pages = ", huge pages" if huge_pages else ""
    return Mover(f"fio, {FIO_ENGINES[setting.backend]}{pages}", run, setting.backend)


def plain_calls(file: DeviceFile, memory: Tensor) -> Mover:
    """pread and pwrite of 1 MiB in one thread."""
    return Mover("pread/pwrite, one thread", lambda writing: (plain_pass(file, memory, writing), None), "")


def deepspeed_handle(module: Any, file: DeviceFile, setting: Setting) -> Mover:
    """DeepSpeed's aio handle, which speaks libaio: the whole file in one call, from memory that it pinned.

    `module` is its compiled extension; see :func:`deepspeed_operators.load_async_io`.
    """
    import torch

    handle = module.aio_handle(setting.block_bytes, setting.queue_depth, False, True, setting.io_threads)
    pinned = handle.new_cpu_locked_tensor(file.nbytes, torch.empty(0, dtype=torch.uint8))
    pinned.view(torch.int64).random_()

    def run(writing: bool) -> tuple[Cost, float | None]:
        begin, used = time.perf_counter(), time.process_time()
        start = handle.async_pwrite if writing else handle.async_pread
        if start(pinned, str(file.path), 0) != 0 or handle.wait() != 1:
            raise RuntimeError(f"DeepSpeed's handle did not move '{file.path}'")
        return Cost(time.perf_counter() - begin, time.process_time() - used), None

    return Mover("DeepSpeed, aio handle", run, "libaio")
