"""The I/O engine against fio and DeepSpeed's handle; an arena against a file per tensor and a block device.

Run from the repository root: python -m benchmarks.aio [--gigabytes 1] [--rounds 9] [--folder DIR]
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.harness.environment import available_bytes, describe
from benchmarks.harness.report import Table, conclude, terminal
from benchmarks.harness.statistics import ratio_of_rounds
from benchmarks.peers.deepspeed_operators import load_async_io
from benchmarks.peers.storage_engines import (
    Mover,
    deepspeed_handle,
    fio_engine,
    own_engine,
    percentile_99,
    plain_calls,
)
from benchmarks.peers.tensor_storage import (
    TensorStorage,
    arena,
    block_device,
    file_per_tensor,
    why_no_loop_device,
)
from zero_ext import ops
from zero_ext.cli.nvme_sweep import DeviceFile, Setting, buffer_bytes, device_file, fio_installed

BLOCK, DEPTH = 1 << 20, 32
FIO_BAR, DEEPSPEED_BAR = 0.95, 1.00
# Two equal contenders differ by a few percent here, so "no worse" needs a margin.
ARENA_BAR = 0.95
MEGABYTE = 1 << 20
# One layer of the 239M Llama in float32: four attention weights, three of the MLP, two norms.
LAYER = (*[4 * MEGABYTE] * 4, *[11 * MEGABYTE] * 3, 4096, 4096)
WINDOW = 8  # tensors under way at once
PASSES = (("write, first", True), ("write, second", True), ("read, first", False), ("read, second", False))


@dataclass
class Passes:
    """What one home of tensors did: set-up seconds, and per pass wall and processor seconds and p99."""

    name: str
    make: Callable[..., AbstractContextManager[TensorStorage]]
    setups: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name, _ in PASSES})
    processor: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name, _ in PASSES})
    p99: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name, _ in PASSES})


def alternate(contenders: Sequence[Any], number: int) -> Sequence[Any]:
    """Turns of one round: forwards and backwards alternately."""
    return contenders if number % 2 == 0 else contenders[::-1]


def movers(file: DeviceFile, memory: Tensor, missing: list[str]) -> list[Mover]:
    """Ours per backend, then everybody else; who cannot take part is named in `missing` with the reason."""
    found = [plain_calls(file, memory)]
    for name, reason in ops.aio_backends().items():
        if reason:
            missing.append(f"{name}: {reason}")
            continue
        setting = Setting(name, BLOCK, DEPTH, 1)
        found.append(own_engine(file, setting, memory))
        if fio_installed():
            found += [fio_engine(file, setting, huge_pages=huge) for huge in (True, False)]
    if not fio_installed():
        missing.append("fio: not installed (apt-get install fio)")
    try:
        found.append(deepspeed_handle(load_async_io(), file, Setting("libaio", BLOCK, DEPTH, 1)))
    except RuntimeError as error:
        missing.append(f"DeepSpeed's aio handle: {' '.join(str(error).split())}")
    return found


def pairs_of(contenders: Sequence[Mover]) -> list[list[Mover]]:
    """Every peer behind ours of its backend; who has no counterpart alone."""
    ours = own(contenders)
    peers = [mover for mover in contenders if mover not in ours.values()]
    found = [[ours[peer.backend], peer] if peer.backend in ours else [peer] for peer in peers]
    met = {peer.backend for peer in peers}
    return found + [[mover] for backend, mover in ours.items() if backend not in met]


def measure_engines(folder: Path, nbytes: int, rounds: int, missing: list[str]) -> list[Mover]:
    """Every mover writes and reads one file each round, right before or after ours of the same backend.

    A disk's rate drifts, and what it was asked for just before shows in it. So the two passes that are
    compared follow each other, each of them first every other round, and the pairs come in an order that is
    random and the same in every run.
    """
    memory = ops.host_buffer(buffer_bytes(Setting("threads", BLOCK, DEPTH, 1)))
    memory.view(torch.int64).random_()
    with device_file(folder, nbytes) as (file, why_not_direct):
        if why_not_direct:
            missing.append(f"O_DIRECT: {why_not_direct}")
        contenders = movers(file, memory, missing)
        for mover in contenders:
            mover.run(True)
        pairs = list(enumerate(pairs_of(contenders)))
        for number in range(rounds):
            for index, pair in random.Random(number).sample(pairs, len(pairs)):
                for writing in (True, False):
                    turn_beside(alternate(pair, number + index), pair[-1], writing)
            for mover in contenders:
                mover.time_blocks()
    return contenders


def turn_beside(order: Sequence[Mover], peer: Mover, writing: bool) -> None:
    """One pass of each; ``peer`` keeps the seconds of the other one."""
    for mover in order:
        mover.turn(writing)
    peer.beside[writing] += [mover.seconds(writing)[-1] for mover in order if mover is not peer]


def own(contenders: Sequence[Mover]) -> dict[str, Mover]:
    """Ours by backend."""
    return {mover.backend: mover for mover in contenders if mover.name.startswith("zero_ext")}


def judge_engines(
    contenders: Sequence[Mover], nbytes: int, writing: bool
) -> tuple[Table, list[dict[str, Any]]]:
    """One direction: a row a mover, and for each peer of ours the ratio of speeds and its bar."""
    title = (
        f"{'Write' if writing else 'Read'}: {nbytes / 1e9:.2f} GB, blocks of 1 MiB, depth {DEPTH}, O_DIRECT"
    )
    table = Table(
        title, ["", "GB/s", "CPU s/GB", "p99 of a block, ms", "zero_ext's speed against it", "bar", "met"]
    )
    figures = []
    for mover in contenders:
        seconds = mover.seconds(writing)
        processor = median(cost.processor_seconds for cost in mover.costs[writing])
        p99 = median(mover.p99[writing]) if mover.p99[writing] else None
        row: dict[str, Any] = {
            "name": mover.name,
            "direction": "write" if writing else "read",
            "gigabytes_per_second": nbytes / median(seconds) / 1e9,
            "processor_seconds_per_gigabyte": processor / nbytes * 1e9,
            "p99_seconds": p99,
            "seconds": seconds,
            "zero_ext_beside_it": mover.beside[writing],
        }
        beside = mover.beside[writing]
        ratio = ratio_of_rounds(seconds, beside) if beside else None
        bar = FIO_BAR if mover.name.startswith("fio") else DEEPSPEED_BAR
        row |= {
            "zero_ext_against_it": ratio.median if ratio else None,
            "bar": bar if ratio else None,
            "met": ratio.at_least(bar) if ratio else None,
        }
        figures.append(row)
        table.rows.append(
            [
                mover.name,
                f"{row['gigabytes_per_second']:.2f}",
                f"{row['processor_seconds_per_gigabyte']:.3f}",
                "" if p99 is None else f"{p99 * 1e3:.1f}",
                ratio.text() if ratio else "",
                f"{bar:.2f}" if ratio else "",
                "" if ratio is None else ("yes" if row["met"] else "no"),
            ]
        )
    return table, figures


def tensor_sizes(nbytes: int) -> list[int]:
    """Layers of the 239M Llama until `nbytes` are reached; at least one layer."""
    return list(LAYER) * max(1, nbytes // sum(LAYER))


def run_pass(storage: TensorStorage, memory: Tensor, sizes: Sequence[int], writing: bool) -> list[float]:
    """Moves every tensor once, WINDOW of them under way; seconds from start to the end of the wait, each."""
    slot_bytes = max(sizes)
    pending: list[tuple[float, Callable[[], None]]] = []
    latencies = []

    def finish() -> None:
        begin, wait = pending.pop(0)
        wait()
        latencies.append(time.perf_counter() - begin)

    for number, size in enumerate(sizes):
        if len(pending) == WINDOW:
            finish()
        begin = number % WINDOW * slot_bytes
        pending.append((time.perf_counter(), storage.start(number, memory[begin : begin + size], writing)))
    while pending:
        finish()
    return latencies


def measure_storages(folder: Path, nbytes: int, rounds: int, missing: list[str]) -> list[Passes]:
    """Every round makes all homes afresh, then each pass of all of them in turn: two writes, two reads.

    As with engines, the two that are compared follow each other, in one order and the other by turns.
    """
    sizes = tensor_sizes(nbytes)
    memory = ops.host_buffer(WINDOW * max(sizes))
    memory.view(torch.int64).random_()
    setting = Setting("auto", BLOCK, DEPTH, 1)
    storages = [Passes("arena in a file", arena), Passes("file per tensor", file_per_tensor)]
    reason = why_no_loop_device()
    if reason:
        missing.append(f"loop block device: {reason}")
    else:
        storages.append(Passes("arena on a loop device", block_device))
    for number in range(rounds):
        with ExitStack() as made:
            opened = []
            for passes in storages:
                begin = time.perf_counter()
                opened.append((passes, made.enter_context(passes.make(folder, sizes, setting))))
                passes.setups.append(time.perf_counter() - begin)
            os.sync()
            for index, (name, writing) in enumerate(PASSES):
                for passes, storage in [*alternate(opened[:2], number + index), *opened[2:]]:
                    start, used = time.perf_counter(), time.process_time()
                    latencies = run_pass(storage, memory, sizes, writing)
                    passes.seconds[name].append(time.perf_counter() - start)
                    passes.processor[name].append(time.process_time() - used)
                    passes.p99[name].append(percentile_99(latencies))
        os.sync()
    return storages


def judge_storages(storages: Sequence[Passes], nbytes: int) -> tuple[Table, list[dict[str, Any]]]:
    """A row a pass and home; the arena's bandwidth, processor time and p99 against the others' are judged."""
    count = len(tensor_sizes(nbytes))
    moved = sum(tensor_sizes(nbytes))
    note = (
        f"{count} tensors of 4 KiB to 11 MiB (layers of the 239M Llama in float32). {WINDOW} are always "
        "under way. p99 is the time from a tensor's start to its end. Where a ratio is above 1, the arena is "
        f"better. No worse means at least {ARENA_BAR:.2f} in all three, asked against a file per tensor. The "
        "arena's space is written once at set-up. The processor time of the loop device's kernel threads "
        "belongs to no process and is not counted."
    )
    columns = ["", "set-up s", "GB/s", "CPU s/GB", "p99, ms", "arena: GB/s", "CPU", "p99", "no worse"]
    table = Table(f"Where tensors lie: {moved / 1e9:.2f} GB", columns, note=note)
    figures: list[dict[str, Any]] = []
    ours = storages[0]
    for name, _ in PASSES:
        for passes in storages:
            ratios = [
                ratio_of_rounds(getattr(passes, what)[name], getattr(ours, what)[name])
                for what in ("seconds", "processor", "p99")
            ]
            judged = passes.make is file_per_tensor
            met = all(ratio.at_least(ARENA_BAR) for ratio in ratios) if judged else None
            figures.append(
                {
                    "name": passes.name,
                    "pass": name,
                    "setup_seconds": median(passes.setups),
                    "gigabytes_per_second": moved / median(passes.seconds[name]) / 1e9,
                    "processor_seconds_per_gigabyte": median(passes.processor[name]) / moved * 1e9,
                    "p99_seconds": median(passes.p99[name]),
                    "seconds": passes.seconds[name],
                    "arena_against_it": [ratio.median for ratio in ratios],
                    "met": met,
                }
            )
            row = figures[-1]
            table.rows.append(
                [
                    f"{name}: {passes.name}",
                    f"{row['setup_seconds']:.2f}",
                    f"{row['gigabytes_per_second']:.2f}",
                    f"{row['processor_seconds_per_gigabyte']:.3f}",
                    f"{row['p99_seconds'] * 1e3:.1f}",
                    *("" if passes is ours else ratio.text() for ratio in ratios),
                    "" if met is None else ("yes" if met else "no"),
                ]
            )
    return table, figures


def main(
    gigabytes: Annotated[float, typer.Option(help="Bytes a pass moves, in units of 2^30.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="Measured turns of each contender.")] = 9,
    folder: Annotated[Path, typer.Option(help="A directory on the device.")] = Path(),
) -> None:
    """Time the engine and the arena against their peers on one device; write the result."""
    console = terminal()
    nbytes = max(int(gigabytes * 2**30) // BLOCK, DEPTH) * BLOCK
    if available_bytes() < 2 * nbytes:
        raise typer.BadParameter("twice --gigabytes of free memory are needed (DeepSpeed pins one file)")
    missing: list[str] = []
    contenders = measure_engines(folder, nbytes, rounds, missing)
    results = [judge_engines(contenders, nbytes, writing) for writing in (False, True)]
    results.append(judge_storages(measure_storages(folder, nbytes, rounds, missing), nbytes))
    tables = [table for table, _ in results]
    rows = [row for _, figures in results for row in figures]
    note = (
        f"Medians of {rounds} rounds. A ratio is that of two passes right after each other, whose order "
        "alternates. It is the median over the rounds with its 95% interval."
    )
    tables[0].note = " ".join([note, *(f"Not measured: {line}." for line in missing)])
    environment = describe() | {"load average at the end": f"{os.getloadavg()[0]:.2f}"}
    data = {"environment": environment, "bytes": nbytes, "not_measured": missing, "results": rows}
    missed = [
        f"{row.get('direction') or row['pass']}, {row['name']}: the bar is missed"
        for row in rows
        if row["met"] is False
    ]
    conclude(console, "aio", "Asynchronous I/O", tables, data, missed)


if __name__ == "__main__":
    typer.run(main)
