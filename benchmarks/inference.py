"""Token generation with parameters on NVMe: time of a forward against its bound, and under a memory cap.

Run from the repository root: python -m benchmarks.inference [--cap-megabytes 1024] [--rounds 9] [--tokens 8]
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.harness.environment import available_bytes, describe
from benchmarks.harness.ranks import Team, TeamFailure
from benchmarks.harness.report import Table, conclude, megabytes, terminal
from benchmarks.harness.shapes import LlamaShape, shape_named
from benchmarks.harness.statistics import Ratio, ratio_of_rounds
from benchmarks.peers.base import nvme_folder
from zero_ext.monitor import MemoryCap, capped

BAR = 1.2
WORKER = "benchmarks.harness.generator"


@dataclass
class Run:
    """One model: what each round took, a forward, in seconds, and whether both sides said the same."""

    shape: LlamaShape
    cap: MemoryCap | None
    parameter_bytes: int = 0
    peak_bytes: int = 0
    start_seconds: float = 0.0
    forward: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    identical: bool = True

    @property
    def bound(self) -> list[float]:
        """What no forward can beat, round by round: the slower of computing and reading."""
        return [max(pair) for pair in zip(self.compute, self.read, strict=True)]

    def ratio(self) -> Ratio:
        """Time of a forward over the bound."""
        return ratio_of_rounds(self.forward, self.bound)

    def figures(self) -> dict[str, Any]:
        """Everything measured, for JSON."""
        values = dataclasses.asdict(self)
        values["cap"] = None if self.cap is None else {"name": self.cap.name, "bytes": self.cap.nbytes}
        return values | {"ratio": dataclasses.asdict(self.ratio()), "met": self.met()}

    def met(self) -> bool:
        """Whether the forward is near enough to the bound, and the results are the same."""
        return self.identical and self.ratio().at_most(BAR)


def beyond(cap_bytes: int, times: float, widths: LlamaShape) -> LlamaShape:
    """Layers of `widths`, as many as make the bfloat16 parameters `times` the cap."""
    one, two = (dataclasses.replace(widths, layers=layers).parameters for layers in (1, 2))
    layers = 1 + math.ceil((times * cap_bytes / 2 - one) / (two - one))
    return dataclasses.replace(widths, name=f"{widths.name}, {layers} layers", layers=max(1, layers))


@contextlib.contextmanager
def teams(cap: MemoryCap | None, threads: int) -> Iterator[tuple[Team, Team]]:
    """The model in memory, and the one on NVMe, the latter under the cap."""
    with (
        Team("in memory", 1, threads, worker=WORKER) as plain,
        Team("on NVMe", 1, threads, worker=WORKER, cap=cap) as stored,
    ):
        yield plain, stored


def measure(run: Run, rounds: int, tokens: int, threads: int, folder: Path) -> None:
    """Both sides generate the same, then decode in turn."""
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix="inference-") as nvme,
        teams(run.cap, threads) as pair,
    ):
        plain, stored = pair
        shape = dataclasses.asdict(run.shape)
        started = stored.ask("start", shape=shape, threads=threads, nvme=nvme)[0]
        run.parameter_bytes, run.start_seconds = started["bytes"], started["seconds"]
        plain.ask("start", shape=shape, threads=threads, nvme=None)
        said = [team.ask("generate", count=tokens)[0] for team in pair]
        run.identical = said[0] == said[1]
        for number in range(rounds):
            sides = pair if number % 2 == 0 else pair[::-1]
            found = {team.name: team.ask("forwards", count=tokens)[0] for team in sides}
            passed = stored.ask("read_pass")[0]
            run.compute.append(_mean(found[plain.name]["seconds"]))
            run.forward.append(_mean(found[stored.name]["seconds"]))
            run.read.append(run.parameter_bytes / (passed["bytes"] / passed["seconds"]))
            run.identical &= found[plain.name]["digests"] == found[stored.name]["digests"]
        run.peak_bytes = stored.ask("peak_bytes")[0]


def _mean(seconds: list[float]) -> float:
    return sum(seconds) / len(seconds)


def table_of(runs: list[Run], rounds: int, tokens: int) -> Table:
    """A row a model."""
    note = (
        f"One process, bfloat16, decoding one token a forward with a KV cache. Medians of {rounds} rounds of "
        f"{tokens} forwards, all sides in turn in each; the ratio is the median of the rounds' ratios "
        "(95% interval). Compute: the same model whole in memory, without a cap. Reading: every unit's "
        "extent once, "
        "in order, through the same store, with nothing to compute. Bound: the slower of the two. Same: all "
        "tokens of generate and the logits of every forward are equal bit for bit to those in memory."
    )
    columns = ["", "cap MB", "parameters MB", "times the cap", "peak RSS MB", "forward s", "compute s"]
    columns += ["reading s", "GB/s", "forward / bound", "bar", "met", "same"]
    table = Table("A forward with parameters on NVMe", columns, note=note)
    for run in runs:
        ratio, read = run.ratio(), median(run.read)
        table.rows.append(
            [
                run.shape.name,
                "" if run.cap is None else megabytes(run.cap.nbytes),
                megabytes(run.parameter_bytes),
                "" if run.cap is None else f"{run.parameter_bytes / run.cap.nbytes:.2f}",
                megabytes(run.peak_bytes),
                f"{median(run.forward):.3f}",
                f"{median(run.compute):.3f}",
                f"{read:.3f}",
                f"{run.parameter_bytes / read / 1e9:.2f}",
                ratio.text(),
                f"≤ {BAR:.1f}",
                "yes" if ratio.at_most(BAR) else "NO",
                "yes" if run.identical else "NO",
            ]
        )
    return table


def main(
    cap_megabytes: Annotated[int, typer.Option(help="The cap on the process; 0 leaves that run out.")] = 1024,
    times: Annotated[float, typer.Option(help="Bytes of parameters over the cap.")] = 5.0,
    widths: Annotated[str, typer.Option(help="The Llama whose layers the capped model has.")] = "1b",
    model: Annotated[str, typer.Option(help="The model without a cap; '' leaves that run out.")] = "239m",
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 9,
    tokens: Annotated[int, typer.Option(min=1, help="Forwards of each side in a round.")] = 8,
    threads: Annotated[int, typer.Option(min=1, help="Threads that compute.")] = 2,
) -> None:
    """Time forwards with parameters on NVMe; write the result."""
    console = terminal()
    folder = Path(nvme_folder())
    cap_bytes = cap_megabytes * 1_000_000
    runs: list[Run] = []
    with capped(lambda watched: cap_bytes) if cap_bytes else contextlib.nullcontext() as cap:
        if model:
            runs.append(Run(_llama(model), None))
        if cap_bytes:
            runs.append(Run(beyond(cap_bytes, times, _llama(widths)), cap))
        for run in runs:
            if available_bytes() < 1.2 * 2 * run.shape.parameters + cap_bytes:
                raise typer.BadParameter(f"the model in memory ({run.shape.name}) needs more than there is")
            with console.status(f"{run.shape.name}: {megabytes(2 * run.shape.parameters)} MB of parameters"):
                try:
                    measure(run, rounds, tokens, threads, folder)
                except TeamFailure as error:
                    print(f"FAILED {run.shape.name}: {error}", file=sys.stderr)
                    raise typer.Exit(1) from None
    environment = describe() | {
        "NVMe folder": str(folder),
        "cap": "none" if cap is None else cap.name,
        "load average at the end": f"{os.getloadavg()[0]:.2f}",
    }
    data = {"environment": environment, "results": [run.figures() for run in runs]}
    missed = [f"{run.shape.name}: a bar is missed" for run in runs if not run.met()]
    conclude(console, "inference", "Inference", [table_of(runs, rounds, tokens)], data, missed)


def _llama(name: str) -> LlamaShape:
    shape = shape_named(name)
    if not isinstance(shape, LlamaShape):
        raise typer.BadParameter(f"{name} is no Llama")
    return shape


if __name__ == "__main__":
    typer.run(main)
