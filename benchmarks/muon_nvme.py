"""Muon with its state on NVMe: the time of a step against that of its computation plus that of its transfers.

Run from the repository root: python -m benchmarks.muon_nvme [--models 34m] [--rounds 7]
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Annotated, Any

import torch
import typer

from benchmarks.harness.environment import describe
from benchmarks.harness.report import Table, conclude, terminal
from benchmarks.harness.shapes import batch_for, shape_named
from benchmarks.harness.statistics import Ratio, ratio_of_rounds
from benchmarks.peers.base import nvme_folder
from benchmarks.peers.zero_ext_engine import ZeroExtTrainer
from zero_ext.config.buffer_sizes import CHUNK_BUFFERS
from zero_ext.offload import NvmeState, visit_chunks
from zero_ext.zero import engine_of
from zero_ext.zero.engine import Engine

BAR = 1.1


def transfer_all(engine: Engine) -> None:
    """Read and write all optimizer state once, in the chunks of a step: one read ahead, one write behind."""
    states = defaultdict[Any, list[tuple[int, NvmeState]]](list)
    for index, master in enumerate(engine.masters):
        if isinstance(master.state, NvmeState):
            states[master.state.stream].append((index, master.state))
    for stream, own in states.items():
        memory = engine.tiers.device.allocate("host", CHUNK_BUFFERS * stream.chunk_bytes, torch.uint8)
        with contextlib.closing(visit_chunks(stream, own, memory.split(stream.chunk_bytes))) as chunks:
            for chunk in chunks:
                chunk.changed = True


def seconds_of(action: Callable[[], object]) -> float:
    """How long `action` takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure(model: str, rounds: int) -> dict[str, Any]:
    """Seconds of each round, and the bytes of a step."""
    shape = shape_named(model)
    near = ZeroExtTrainer(shape, stage=3, rule="muon")
    stored = ZeroExtTrainer(shape, stage=3, optimizer="nvme", grads="host", rule="muon")
    engine = engine_of(stored.model)
    found: dict[str, list[float]] = {"device": [], "nvme": [], "transfers": []}
    for step in range(rounds + 1):
        tokens = batch_for(shape, 0, step)
        seconds_by_name = {
            "device": seconds_of(partial(near.step, tokens)),
            "nvme": seconds_of(partial(stored.step, tokens)),
        }
        moved = engine.tiers.transfers.last_moved
        seconds_by_name["transfers"] = seconds_of(partial(transfer_all, engine))
        engine.tiers.transfers.begin_step()  # the next step is not to count them
        for name, seconds in seconds_by_name.items() if step else ():
            found[name].append(seconds)
    read, written = moved["nvme", "host"], moved["host", "nvme"]
    stored.close()
    bounds = [sum(pair) for pair in zip(found["device"], found["transfers"], strict=True)]
    ratio = asdict(ratio_of_rounds(found["nvme"], bounds))
    return {"model": model, "seconds": found, "ratio": ratio, "read": read, "written": written}


def main(
    models: Annotated[str, typer.Option(help="Comma-separated shapes: tiny, 34m, 239m.")] = "34m",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each gives one ratio.")] = 7,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the one rank.")] = 2,
) -> None:
    """Time both in turn, print the ratio, write the result."""
    console = terminal()
    torch.set_num_threads(threads)
    runs = [measure(model, rounds) for model in models.split(",")]
    note = (
        f"Ratio: the step on NVMe over the sum of the other two, median of {rounds} rounds in turn. "
        "Transfers: all state read and written once in the chunks of a step, which is what a step moves. "
        f"One rank, {threads} threads, stage 3, bfloat16, Muon for the blocks, AdamW for the rest."
    )
    columns = "model|on the device ms|transfers alone ms|on NVMe ms|MB moved|ratio|95% interval|bar|met"
    table = Table("A step with all optimizer state on NVMe", tuple(columns.split("|")), note=note)
    failures = []
    for run in runs:
        middle = {name: 1e3 * median(seconds) for name, seconds in run["seconds"].items()}
        ratio = Ratio(**run["ratio"])
        cells = [f"{middle[name]:.0f}" for name in ("device", "transfers", "nvme")]
        moved = f"{(run['read'] + run['written']) / 1e6:,.0f}"
        verdict = [f"{ratio.median:.3f}", ratio.interval(), f"≤ {BAR}", "yes" if ratio.at_most(BAR) else "NO"]
        table.rows.append([run["model"], *cells, moved, *verdict])
        if not ratio.at_most(BAR):
            failures.append(f"{run['model']}: {ratio.text(3)}, at most {BAR} wanted")
    data = {"environment": {**describe(), "NVMe folder": nvme_folder()}, "runs": runs, "failures": failures}
    conclude(console, "muon_nvme", "Muon with its state on NVMe", [table], data, failures)


if __name__ == "__main__":
    typer.run(main)
