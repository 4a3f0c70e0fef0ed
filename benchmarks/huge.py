"""One training step of a model far larger than memory: disk and memory predicted first, then measured.

Run from the repository root: python -m benchmarks.huge [--model 7b] [--steps 1]
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness.environment import describe, total_bytes
from benchmarks.harness.prediction import Prediction, predict
from benchmarks.harness.ranks import Team
from benchmarks.harness.report import Table, conclude, megabytes, terminal
from benchmarks.harness.shapes import SEQUENCE_LENGTH, LlamaShape, shape_named
from benchmarks.peers import contender_named
from benchmarks.peers.base import nvme_folder
from zero_ext.monitor import file_bytes

CONTENDER = "huge@1"
TOLERANCE = 0.05
LIMIT_SECONDS = 20 * 60.0


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[list[int]]:
    """A list of `file_bytes`, one for every second that the block runs."""
    found, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(1.0):
            found.append(file_bytes(folder))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def measure(shape: LlamaShape, steps: int, folder: Path) -> dict[str, Any]:
    """Builds, prepares and trains in a fresh process; seconds and bytes."""
    contender = contender_named(CONTENDER)
    with Team(contender.title, 1, contender.threads, timeout_seconds=3600) as team:
        began = time.perf_counter()
        with watched(folder) as found:
            (started,) = team.start(contender, shape.name)
        built = time.perf_counter() - began
        stored = file_bytes(folder)
        (answer,) = team.ask("steps", unmeasured=0, measured=steps)
        (memory,) = team.ask("memory")
        (staging,) = team.ask("staging")
    return {
        "build_seconds": built,
        "step_seconds": answer["seconds"] / steps,
        "losses": answer["losses"],
        "store": stored,
        "store_peak": max(found),
        "libraries": started["before"],
        "construction_peak": started["peak"],
        "peak": memory["peak"],
        "staging": sum(staging.values()),
    }


def compare(predicted: Prediction, measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Predicted and measured bytes of the store and of memory; libraries count as they were found."""
    written_at_init = predicted.state.params  # written as the model is built, and again into its shards
    stored = written_at_init + predicted.state.optimizer
    rows = [
        ("NVMe, while it trains", stored, measured["store"]),
        ("NVMe, peak while it is prepared", stored + written_at_init, measured["store_peak"]),
        ("peak memory", measured["libraries"] + predicted.memory, measured["peak"]),
    ]
    return [
        {"what": what, "predicted": before, "measured": after, "off_by": after / before - 1}
        for what, before, after in rows
    ]


def table_of(shape: LlamaShape, rows: list[dict[str, Any]], measured: dict[str, Any]) -> Table:
    """Predictions beside what was measured."""
    losses = ", ".join(f"{loss:.4f}" for loss in measured["losses"])
    table = Table(
        f"{shape.parameters / 1e9:.2f}B parameters on one machine of {total_bytes() / 2**30:.0f} GiB",
        ("what", "predicted MB", "measured MB", "off by", f"within {TOLERANCE:.0%}"),
        note=f"Built and prepared in {measured['build_seconds']:.0f} s, a step took"
        f" {measured['step_seconds']:.0f} s; loss {losses}. 1 × {SEQUENCE_LENGTH} tokens, bfloat16"
        " parameters, float32 masters, 8-bit moments, AdamW, gradients used up in backward. Peak"
        " memory: VmHWM of the process from its start; predicted: libraries as found, staging,"
        " activations, the largest gradient.",
    )
    for row in rows:
        within = "yes" if abs(row["off_by"]) <= TOLERANCE else "NO"
        cells = [megabytes(row["predicted"]), megabytes(row["measured"]), f"{row['off_by']:+.1%}", within]
        table.rows.append([row["what"], *cells])
    return table


def main(
    model: Annotated[str, typer.Option(help="Shape, such as 7b or llama-1024x16.")] = "7b",
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 1,
) -> None:
    """Train a model that memory cannot hold; write the result."""
    console = terminal()
    shape = shape_named(model)
    if not isinstance(shape, LlamaShape):
        raise typer.BadParameter(f"--model: {model!r} is no Llama")
    folder = Path(nvme_folder()) / f"zero-ext-huge-{os.getpid()}"
    folder.mkdir()
    os.environ["ZERO_EXT_BENCH_NVME"] = str(folder)
    try:
        predicted = predict(shape, CONTENDER)
        console.print(f"in bytes: {predicted}")
        measured = measure(shape, steps, folder)
        left = sorted(path.name for path in folder.iterdir())
    finally:
        for path in folder.iterdir():
            console.print(f"left behind: {path}")
        if not any(folder.iterdir()):
            folder.rmdir()
    rows = compare(predicted, measured)
    table = table_of(shape, rows, measured)
    data = {
        "environment": describe(),
        "predicted": asdict(predicted),
        "measured": measured,
        "comparison": rows,
    }
    failures: list[str] = []
    seconds = measured["build_seconds"] + steps * measured["step_seconds"]
    if left or seconds > LIMIT_SECONDS or any(abs(row["off_by"]) > TOLERANCE for row in rows):
        failures.append(f"{seconds:.0f} s, left behind {left}; see the table")
    conclude(console, "huge", "A model far larger than memory", [table], data, failures)


if __name__ == "__main__":
    typer.run(main)
