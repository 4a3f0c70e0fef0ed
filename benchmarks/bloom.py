"""A model with one huge parameter, BLOOM-560M's tied embedding: staging, losses, peak against DeepSpeed's.

Run from the repository root: python -m benchmarks.bloom [--model bloom-560m] [--steps 20]
"""

from typing import Annotated, Any

import typer

from benchmarks.harness.environment import describe
from benchmarks.harness.ranks import Team, TeamFailure
from benchmarks.harness.report import Table, conclude, megabytes, terminal
from benchmarks.harness.shapes import SEQUENCE_LENGTH, shape_named
from benchmarks.harness.statistics import largest_difference
from benchmarks.peers import contender_named
from benchmarks.peers.base import nvme_folder
from benchmarks.peers.deepspeed_operators import compile_for

REFERENCE = "stage3@1"
ALONE = (REFERENCE, "stage3-stored@1", "stage3-tiled@1", "deepspeed3-stored@1")
PAIR = ("stage3-stored", "stage3-tiled", "deepspeed3-stored")
PEER_STEPS = 2
# Subject, peer, figure, highest ratio that passes.
BARS = (
    ("stage3-stored@1", "deepspeed3-stored@1", "host", 0.5),
    ("stage3-tiled@1", "deepspeed3-stored@1", "staging", 0.5),
    ("stage3-stored", "deepspeed3-stored", "peak", 0.8),
    ("stage3-tiled", "deepspeed3-stored", "peak", 0.8),
)
FIGURES = {"host": "host staging", "staging": "host staging and device pool", "peak": "peak resident memory"}


def reading(key: str, model: str, steps: int) -> dict[str, Any]:
    """Losses of rank 0, seconds a step and bytes of the fullest rank of one contender in fresh processes."""
    contender = contender_named(key)
    with Team(contender.title, contender.ranks, contender.threads, timeout_seconds=1800) as team:
        team.start(contender, model)
        answers = team.ask("steps", unmeasured=0, measured=steps)
        staging = team.ask("staging")
        memory = team.ask("memory")
    host, device = (max(answer[tier] for answer in staging) for tier in ("host", "device"))
    return {
        "losses": answers[0]["losses"],
        "seconds": max(answer["seconds"] for answer in answers) / steps,
        "host": host,
        "device": device,
        "staging": host + device,
        "peak": max(answer["peak"] for answer in memory),
    }


def comparisons(readings: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for every bar both sides of which were measured."""
    return [
        {
            "subject": subject,
            "peer": peer,
            "figure": figure,
            "ratio": readings[subject][figure] / readings[peer][figure],
            "bar": bar,
        }
        for subject, peer, figure, bar in BARS
        if subject in readings and peer in readings and readings[peer][figure]
    ]


def comparison_table(rows: list[dict[str, Any]], readings: dict[str, dict[str, Any]]) -> Table:
    """What the bars speak of."""
    table = Table(
        "Against DeepSpeed", ("zero_ext / peer", "figure", "zero_ext MB", "peer MB", "ratio", "bar", "met")
    )
    for row in rows:
        subject, peer, figure = row["subject"], row["peer"], row["figure"]
        table.rows.append(
            [
                f"{contender_named(subject).title} / {contender_named(peer).title}",
                FIGURES[figure],
                megabytes(readings[subject][figure]),
                megabytes(readings[peer][figure]),
                f"{row['ratio']:.3f}",
                f"≤ {row['bar']:.2f}",
                "yes" if row["ratio"] <= row["bar"] else "NO",
            ]
        )
    return table


def reading_table(readings: dict[str, dict[str, Any]]) -> Table:
    """Every contender: its bytes, and how its losses differ from those of the run in memory."""
    table = Table(
        "Contenders",
        ("contender", "steps", "host staging MB", "device pool MB", "peak MB", "s/step", "losses", "off by"),
        note=f"Off by: the largest relative difference of a loss from the run with everything on the device;"
        f" 0 means bit-identical. 1 × {SEQUENCE_LENGTH} tokens a rank. DeepSpeed's host staging: its swap"
        " buffers; its device memory is not pooled.",
    )
    reference = readings.get(REFERENCE)
    for key, found in readings.items():
        losses = found["losses"]
        alone = key.endswith("@1") and reference is not None
        off = largest_difference(losses, reference["losses"][: len(losses)]) if alone and reference else None
        table.rows.append(
            [
                contender_named(key).title,
                str(len(losses)),
                megabytes(found["host"]),
                megabytes(found["device"]),
                megabytes(found["peak"]),
                f"{found['seconds']:.1f}",
                f"{losses[0]:.4f} → {losses[-1]:.4f}",
                "" if off is None else f"{off:.1e}",
            ]
        )
    return table


def main(
    model: Annotated[str, typer.Option(help="Shape: bloom-560m or bloom-tiny.")] = "bloom-560m",
    steps: Annotated[int, typer.Option(min=1, help="Steps of zero_ext on one rank.")] = 20,
    only: Annotated[str, typer.Option(help="Comma-separated contenders.")] = "",
) -> None:
    """Measure staging, losses and peaks on BLOOM's shape; write the result."""
    console = terminal()
    shape_named(model)
    keys = [key for key in only.split(",") if key] or [*ALONE, *PAIR]
    compile_for(keys, console)
    readings: dict[str, dict[str, Any]] = {}
    failures: list[str] = []
    for key in keys:
        count = steps if key in ALONE and contender_named(key).family == "zero_ext" else PEER_STEPS
        console.print(f"{contender_named(key).title}: {count} steps", highlight=False)
        try:
            readings[key] = reading(key, model, count)
        except TeamFailure as failure:
            failures.append(f"{key}: {failure}")
    rows = comparisons(readings)
    tables = [table for table in (comparison_table(rows, readings), reading_table(readings)) if table.rows]
    environment = {**describe(), "NVMe folder": nvme_folder()}
    data = {"environment": environment, "comparisons": rows, "readings": readings, "failures": failures}
    if any(row["ratio"] > row["bar"] for row in rows):
        failures.append("a bar is missed")
    conclude(console, "bloom", f"One huge parameter: {model}", tables, data, failures)


if __name__ == "__main__":
    typer.run(main)
