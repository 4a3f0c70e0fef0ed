"""Saving and loading against a plain sequential write and read of the same bytes, and against PyTorch and
DeepSpeed, in turn, on the same disk.

Run from the repository root: python -m benchmarks.checkpoint [--gigabytes 1.5] [--rounds 7] [--folder DIR]
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from benchmarks.harness.checkpoint_peers import LOADS, SAVES, Tensors, discard, files_of, start_dcp_save
from benchmarks.harness.environment import available_bytes, describe
from benchmarks.harness.report import Table, conclude, terminal
from benchmarks.harness.statistics import ratio_of_rounds
from zero_ext import ops
from zero_ext.checkpoint import SaveHandle, load_state, save_state
from zero_ext.checkpoint.files import raw_view

SPEED_BAR = 0.80  # of the plain write's or read's speed
PLAIN_BLOCK = 16 << 20
KINDS = ("master", "exp_avg", "exp_avg_sq")
LAYER = (
    1024 * 1024,
    1024 * 1024,
    1024 * 1024,
    1024 * 1024,
    1024 * 2816,
    1024 * 2816,
    1024 * 2816,
    1024,
    1024,
)


class HeldSlice(NamedTuple):
    """A whole state tensor, as one rank holds it."""

    kind: str
    name: str
    start: int
    tensor: Tensor
    shape: None = None


class Parameter(NamedTuple):
    """One parameter of the table."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] = (1,)
    dtype: str = "bfloat16"
    aliases: tuple[str, ...] = ()
    trainable: bool = True


class Limits(NamedTuple):
    """The configuration that checkpoints read."""

    timeout_seconds: float = 600.0


class State:
    """Masters and moments of a Llama's layers (the 239M shape) on one rank, in one host buffer."""

    rank, world_size, group, config = 0, 1, None, Limits()

    def __init__(self, nbytes: int) -> None:
        layers = max(1, nbytes // (sum(LAYER) * 4 * len(KINDS)))
        sizes = {f"layer{n}.weight{k}": size for n in range(layers) for k, size in enumerate(LAYER)}
        self.table = {name: Parameter((size,)) for name, size in sizes.items()}
        self.memory = ops.host_buffer(sum(sizes.values()) * 4 * len(KINDS))
        values = self.memory.view(torch.float32)
        values.normal_(generator=torch.Generator().manual_seed(1))
        self.slices, begin = [], 0
        for kind in KINDS:
            for name, size in sizes.items():
                self.slices.append(HeldSlice(kind, name, 0, values[begin : begin + size]))
                begin += size

    def tensors(self) -> Tensors:
        """Return the state by name, in its own memory."""
        return {f"{each.kind}.{each.name}": each.tensor for each in self.slices}

    def copies(self) -> Tensors:
        """Return the state by name, each tensor with a storage of its own."""
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def parameter_table(self) -> Mapping[str, Parameter]:
        return self.table

    def save_slices(self) -> Iterator[HeldSlice]:
        return iter(self.slices)

    def load_slices(self) -> Iterator[HeldSlice]:
        return iter(self.slices)

    def scalar_state(self) -> dict[str, Any]:
        return {"steps": 1}

    def load_scalar_state(self, state: dict[str, Any]) -> None:
        pass

    def buffers(self) -> Mapping[str, Tensor]:
        return {}

    def finish_load(self, optimizer: bool = True) -> None:
        pass


@dataclass
class Contender:
    """Something timed; `before` puts the disk and the page cache in order, unmeasured."""

    name: str
    before: Callable[[], None]
    run: Callable[[], None]
    after: Callable[[], None] = lambda: None
    has_bar: bool = False
    seconds: list[float] = field(default_factory=list)


def plain_write(path: Path, memory: Tensor, flags: int) -> None:
    """One file, block after block, then fsync."""
    view = raw_view(memory)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o644)
    try:
        done = 0
        while done < len(view):
            done += os.write(descriptor, view[done : done + PLAIN_BLOCK])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def plain_read(path: Path, memory: Tensor) -> None:
    """One file, block after block, into memory that exists already."""
    view = raw_view(memory)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < len(view):
            done += os.preadv(descriptor, [view[done : done + PLAIN_BLOCK]], done)
    finally:
        os.close(descriptor)


def forget(path: Path) -> None:
    """Drops the pages of a file, or of a folder's files, from the page cache."""
    for file in files_of(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def savers(folder: Path, state: State) -> list[Contender]:
    """Ours first, then the plain writes and the peers. Each finds its target gone and the disk quiet."""
    ours, plain, theirs = folder / "ours", folder / "plain.bin", folder / "peer"
    tensors = state.copies()

    def clear() -> None:
        for path in (ours, plain, theirs):
            discard(path)
        os.sync()

    return [
        Contender("zero_ext save", clear, lambda: [save_state(ours, state)].clear()),
        Contender("plain write", clear, lambda: plain_write(plain, state.memory, 0), has_bar=True),
        Contender("plain write, direct", clear, lambda: plain_write(plain, state.memory, os.O_DIRECT)),
        *(Contender(name, clear, partial(save, theirs, tensors)) for name, save in SAVES.items()),
    ]


def loaders(folder: Path, state: State) -> list[Contender]:
    """Ours first, then the plain read and the peers, of files that are not in the page cache."""
    ours, plain = folder / "ours", folder / "plain.bin"
    saved = {name: folder / f"peer-{number}" for number, name in enumerate(SAVES)}
    tensors, wanted = state.copies(), state.copies()
    for path in (ours, plain):
        discard(path)
    save_state(ours, state)
    plain_write(plain, state.memory, 0)
    for name, path in saved.items():
        SAVES[name](path, tensors)

    def cool() -> None:
        for memory in (state.memory, *tensors.values()):
            memory.fill_(255)  # the last contender must not have done this one's work
        os.sync()
        for path in (ours / "step-000001", plain, *saved.values()):
            forget(path)

    check = partial(check_loaded, state.tensors(), wanted)
    check_peer = partial(check_loaded, tensors, wanted)
    return [
        Contender("zero_ext load", cool, lambda: [load_state(ours, state)].clear(), check),
        Contender("plain read", cool, lambda: plain_read(plain, state.memory), check, has_bar=True),
        *(
            Contender(name, cool, partial(load, saved[peer], tensors), check_peer)
            for name, (peer, load) in LOADS.items()
        ),
    ]


def blockers(folder: Path, state: State) -> list[Contender]:
    """How long a background save keeps the training step waiting, against one copy of the same bytes and
    against DCP."""
    ours, theirs = folder / "ours", folder / "peer"
    handles: list[SaveHandle] = []
    futures: list[Future[Any]] = []
    tensors = state.copies()

    def wait_for_saves() -> None:
        while handles:
            handles.pop().wait()
        while futures:
            futures.pop().result()
        for path in (ours, theirs):
            discard(path)
        os.sync()

    def start() -> None:
        handles.append(save_state(ours, state, async_save=True))

    def start_peer() -> None:
        futures.append(start_dcp_save(theirs, tensors))

    def copy() -> None:
        ops.host_buffer(state.memory.numel()).copy_(state.memory)

    return [
        Contender("zero_ext background save", wait_for_saves, start, wait_for_saves),
        Contender("one host copy", wait_for_saves, copy, has_bar=True),
        Contender("torch DCP", wait_for_saves, start_peer, wait_for_saves),
    ]


def run_in_turn(contenders: list[Contender], rounds: int) -> None:
    """One turn each a round, forwards and backwards alternately, after an unmeasured one."""
    for number in range(rounds + 1):
        for contender in contenders if number % 2 == 0 else contenders[::-1]:
            contender.before()
            begin = time.perf_counter()
            contender.run()
            if number:
                contender.seconds.append(time.perf_counter() - begin)
            contender.after()


def judge(title: str, contenders: list[Contender], nbytes: int) -> tuple[Table, list[dict[str, Any]]]:
    """The table and the figures."""
    ours = contenders[0]
    note = (
        f"Medians of {len(ours.seconds)} rounds, in which all take turns. Ratios are medians of the rounds' "
        f"ratios (95% interval). Bar: {SPEED_BAR:.2f} of the plain speed."
    )
    table = Table(title, ["", "s", "GB/s", "zero_ext's speed against it", "bar met"], note=note)
    figures = []
    for contender in contenders:
        ratio = ratio_of_rounds(contender.seconds, ours.seconds)
        met = ratio.at_least(SPEED_BAR) if contender.has_bar else None
        seconds = median(contender.seconds)
        table.rows.append(
            [
                contender.name,
                f"{seconds:.3f}",
                f"{nbytes / seconds / 1e9:.2f}",
                "" if contender is ours else ratio.text(),
                "" if met is None else ("yes" if met else "no"),
            ]
        )
        figures.append(
            {
                "name": contender.name,
                "seconds": contender.seconds,
                "gigabytes_per_second": nbytes / seconds / 1e9,
                "speed_of_zero_ext_against_it": ratio.median,
                "bar_met": met,
            }
        )
    return table, figures


def check_loaded(found: Tensors, wanted: Tensors) -> None:
    """RuntimeError unless all tensors that were loaded are those that were saved."""
    if not all(torch.equal(found[name], value) for name, value in wanted.items()):
        raise RuntimeError("the loaded state differs from the saved one")


def main(
    gigabytes: Annotated[float, typer.Option(help="State, in units of 10^9 bytes.")] = 1.5,
    rounds: Annotated[int, typer.Option(min=1, help="Measured turns of each contender.")] = 7,
    folder: Annotated[Path | None, typer.Option(help="Where to write; a temporary folder there.")] = None,
) -> None:
    """Time save and load against plain writes and reads of the same bytes; write the result."""
    console = terminal()
    if available_bytes() < 6 * gigabytes * 1e9:
        raise typer.BadParameter("six times --gigabytes of free memory are needed")
    with tempfile.TemporaryDirectory(dir=folder, prefix="checkpoint-benchmark-") as name:
        target = Path(name)
        if shutil.disk_usage(target).free < 6 * gigabytes * 1e9:
            raise typer.BadParameter("six times --gigabytes of free disk are needed")
        state = State(int(gigabytes * 1e9))
        nbytes = state.memory.numel()
        results, tables, missed = [], [], []
        matches = (
            ("Save, to the disk", savers),
            ("Background save, until training goes on", blockers),
            ("Load, cold page cache", loaders),  # the last one, as it overwrites the state
        )
        for title, make in matches:
            contenders = make(target, state)
            run_in_turn(contenders, rounds)
            table, figures = judge(f"{title}: {nbytes / 1e9:.2f} GB, one rank", contenders, nbytes)
            tables.append(table)
            missed += [
                f"{title}, {row['name']}: the bar is missed" for row in figures if row["bar_met"] is False
            ]
            results += figures
    load = os.getloadavg()[0]
    data = {
        "environment": describe() | {"load average at the end": f"{load:.2f}"},
        "bytes": nbytes,
        "results": results,
    }
    conclude(console, "checkpoint", "Checkpoints", tables, data, missed)


if __name__ == "__main__":
    typer.run(main)
