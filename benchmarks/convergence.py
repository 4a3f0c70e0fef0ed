"""Whether compressed communication costs quality: held-out loss on real text against uncompressed training.

Run from the repository root: python -m benchmarks.convergence [--what 34m] [--minutes 9] [--modes adam,lamb]
It goes on where the last call stopped; a call that ends in the middle of a run keeps a checkpoint of it.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.harness.compressed_modes import MODES, mode_named
from benchmarks.harness.convergence_run import RANKS, Record, advance
from benchmarks.harness.convergence_verdict import Verdict, judge, plot
from benchmarks.harness.environment import describe, start
from benchmarks.harness.report import Table, conclude, terminal
from benchmarks.harness.text_model import TextRun, text_run
from examples.demo.corpus import gather_corpus

ALL_MODES = "adam,onebit_adam,zero_one_adam,zeropp,lamb,onebit_lamb"
RUNS = Path("runs") / "convergence"  # a folder for each commit: runs of one do not count for another


def train(wanted: list[Record], root: Path, minutes: float, console: Console) -> list[Record]:
    """Goes through the runs one after the other until time is up; what is known of each afterwards."""
    deadline = time.monotonic() + 60 * minutes
    if not (root / "held_out.txt").exists():
        gather_corpus().write(root)

    def publish(record: Record) -> None:
        step, loss = record.curve[-1]
        pace = record.seconds / record.done
        console.print(
            f"{record.mode}, seed {record.seed}, step {step}: {loss:.4f} ({pace:.3f} s/step)", highlight=False
        )

    found = []
    for each in wanted:
        record = each.read(root)
        if not record.finished and time.monotonic() < deadline:
            record = advance(record, root, deadline, publish)
        found.append(record)
    return found


def ends_table(verdicts: list[Verdict], run: TextRun, steps: int) -> Table:
    """Where the modes end."""
    table = Table(
        f"Held-out loss over the last steps of {steps:,}",
        ("mode", "seeds", "held-out loss", "spread of seeds", "against", "ratio", "at most", "met"),
        note=f"Nats per byte of Python's documentation, documents held out; mean over "
        f"{run.held_out_windows} windows, taken every 10 of the last 100 steps. {RANKS} ranks of "
        f"{run.batch} × {run.window} bytes, {run.shape.parameters:,} parameters; the same weights and "
        f"windows for every mode of a seed. The one-bit family sends {run.warm_up:.0%} of the steps in full "
        "precision. At most: 1 plus 1% (1.5% for ZeRO++ with int4), or plus the spread of the uncompressed "
        "mode's seeds if that is more.",
    )
    for verdict in verdicts:
        mode = mode_named(verdict.mode)
        judged = [mode.against or "", "", "", ""]
        if verdict.ratio is not None:
            judged[1] = f"{verdict.ratio:.4f}"
        if verdict.bar is not None:
            judged[2:] = [f"{verdict.bar:.4f}", "yes" if verdict.met else "no"]
        seeds = ", ".join(map(str, verdict.seeds))
        table.rows.append([mode.title, seeds, f"{verdict.held_out:.4f}", f"{verdict.spread:.2%}", *judged])
    return table


def bytes_table(records: list[Record], nodes: int) -> Table:
    """What a whole run sent, against half-precision gradients of the same steps."""
    table = Table(
        "Bytes of a whole run",
        ("mode", "seed", "sent, MB a rank and step", "between nodes, MB a node and step", "s/step"),
        note="Means over all steps, warm-up included; two simulated nodes of two ranks. Seconds beside other "
        "work on the same cores, as they came.",
    )
    for record in records:
        if record.finished:
            sent = sum(record.sent.values()) / RANKS / record.steps / 1e6
            crossing = sum(record.crossing.values()) / nodes / record.steps / 1e6
            seconds = f"{record.seconds / record.steps:.3f}"
            table.rows.append(
                [mode_named(record.mode).title, str(record.seed), f"{sent:.3f}", f"{crossing:.3f}", seconds]
            )
    return table


def main(
    what: Annotated[str, typer.Option(help="8m-bytes or 34m.")] = "8m-bytes",
    minutes: Annotated[float, typer.Option(help="Start and continue runs for so long.")] = 9.0,
    modes: Annotated[
        str, typer.Option(help=f"Of {', '.join(MODES)}; muon@2: twice its learning rate.")
    ] = ALL_MODES,
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions with other weights and data.")] = 2,
    steps: Annotated[int, typer.Option(help="Other than the run's own; 0: those.")] = 0,
    dtype: Annotated[str, typer.Option(help="Of parameters; masters are fp32.")] = "bf16",
    folder: Annotated[
        Path | None, typer.Option(help="Continues runs from there; by default runs/convergence/COMMIT.")
    ] = None,
) -> None:
    """Train, then judge what has finished; write the result."""
    console = terminal()
    run = text_run(what)
    wanted = [
        Record(what, mode_named(name).name, seed, dtype, steps or run.steps)
        for seed in range(seeds)
        for name in modes.split(",")
    ]
    records = train(wanted, (folder or RUNS / start().commit).absolute(), minutes, console)
    verdicts = judge(records)
    waiting = Table("Not finished: call again", ("mode", "seed", "steps"))
    waiting.rows += [[each.mode, str(each.seed), str(each.done)] for each in records if not each.finished]
    begun = [record for record in records if record.curve]
    failures = [
        f"{verdict.mode}: {verdict.ratio:.4f} times the loss of {mode_named(verdict.mode).against}, at most "
        f"{verdict.bar:.4f} wanted"
        for verdict in verdicts
        if verdict.met is False
    ]
    data: dict[str, Any] = {"environment": describe(), "unfinished": waiting.rows}
    data["verdicts"] = [asdict(verdict) | {"met": verdict.met} for verdict in verdicts]
    data["runs"] = [asdict(record) for record in begun]
    tables = [ends_table(verdicts, run, steps or run.steps), bytes_table(records, nodes=2), waiting]
    conclude(
        console,
        f"convergence/{what}",
        "Quality of compressed communication",
        tables,
        data,
        failures,
        plot=partial(plot, begun, f"{what}: held-out loss on real text") if begun else None,
        complete=not waiting.rows,
    )


if __name__ == "__main__":
    typer.run(main)
