"""Host and NVMe offload: step time and resident memory of zero_ext against DeepSpeed's, in turn in one run.

Run from the repository root: python -m benchmarks.offload [--models 34m,239m] [--rounds 5] [--steps 3]
"""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from benchmarks.harness.environment import describe
from benchmarks.harness.matches import OFFLOAD_MATCHES, contenders_of, select
from benchmarks.harness.prediction import predict
from benchmarks.harness.report import Table, conclude, megabytes, terminal
from benchmarks.harness.shapes import LlamaShape, shape_named
from benchmarks.memory import resident_readings, resident_table
from benchmarks.peers import contender_named, titles_of
from benchmarks.peers.base import nvme_folder
from benchmarks.peers.deepspeed_operators import compile_for
from benchmarks.step import measure, missed_bars, ratios_table, times_table

# Subject, peer, highest ratio of their whole peaks that passes.
PEAK_BARS = (
    ("stage3-nvme", "deepspeed3-nvme", 0.5),
    ("stage3-nvme", "stage3", 1.0),
    ("stage3-stored", "deepspeed3-nvme", 0.5),
    ("stage3-host", "deepspeed3-host", None),
)
# Whole peak over the formula's, within.
FORMULA = ("libraries", "state_in_memory", "staging", "activations", "gradient")
FORMULA_TOLERANCE = {"stage3-stored": 0.10}


def peak_rows(readings: dict[str, dict[str, dict[str, int]]]) -> list[dict[str, Any]]:
    """Whole peaks of subject and peer in bytes, their ratio and whether it passes."""
    return [
        {
            "model": model,
            "subject": subject,
            "peer": peer,
            "subject_peak": by_key[subject]["overall_peak"],
            "peer_peak": by_key[peer]["overall_peak"],
            "ratio": by_key[subject]["overall_peak"] / by_key[peer]["overall_peak"],
            "bar": bar,
        }
        for model, by_key in readings.items()
        for subject, peer, bar in PEAK_BARS
        if subject in by_key and peer in by_key
    ]


def peak_table(rows: list[dict[str, Any]]) -> Table:
    """The comparison the bars speak of."""
    table = Table(
        "Peak resident memory of a rank",
        ("zero_ext / peer", "model", "zero_ext MB", "peer MB", "ratio", "bar", "met"),
        note="VmHWM of whole processes, libraries included, from construction to the last step; the highest"
        " rank.",
    )
    for row in rows:
        bar = row["bar"]
        table.rows.append(
            [
                titles_of(row["subject"], row["peer"], row["model"]),
                row["model"],
                megabytes(row["subject_peak"]),
                megabytes(row["peer_peak"]),
                f"{row['ratio']:.3f}",
                "" if bar is None else f"≤ {bar:.2f}",
                "" if bar is None else ("yes" if row["ratio"] <= bar else "NO"),
            ]
        )
    return table


def formula_rows(readings: dict[str, dict[str, dict[str, int]]]) -> list[dict[str, Any]]:
    """Whole peaks beside what the formulas of `zero_ext.plan` say, libraries as they were found."""
    rows: list[dict[str, Any]] = []
    for model, by_key in readings.items():
        shape = shape_named(model)
        for key, tolerance in FORMULA_TOLERANCE.items():
            if key not in by_key or not isinstance(shape, LlamaShape):
                continue
            found, columns = by_key[key], asdict(predict(shape, key))
            rows.append({"model": model, "contender": key, "libraries": found["libraries"], **columns})
            rows[-1] |= {"measured": found["overall_peak"], "tolerance": tolerance}
            rows[-1]["off_by"] = found["overall_peak"] / sum(rows[-1][column] for column in FORMULA) - 1
    return rows


def missed_peaks(peaks: list[dict[str, Any]], formula: list[dict[str, Any]]) -> list[str]:
    """The peaks that miss their bar against a peer or against the formula."""
    found = [
        f"{row['model']}, {row['subject']} / {row['peer']}: peak {row['ratio']:.3f}, bar {row['bar']}"
        for row in peaks
        if row["bar"] is not None and row["ratio"] > row["bar"]
    ]
    return found + [
        f"{row['model']}, {row['contender']}: peak {row['off_by']:+.1%} off the formula"
        for row in formula
        if abs(row["off_by"]) > row["tolerance"]
    ]


def formula_table(rows: list[dict[str, Any]]) -> Table:
    """Every part of the formula, and the peak."""
    table = Table(
        "Peak resident memory against the formula, MB a rank",
        (
            "contender",
            "model",
            *(column.replace("_", " ") for column in FORMULA),
            "sum",
            "measured",
            "off by",
            "met",
        ),
        note="Libraries as found before the model exists; staging as prepare allocates it; activations of one"
        " micro-batch as PyTorch alone keeps them; the largest gradient.",
    )
    for row in rows:
        total, off = sum(row[column] for column in FORMULA), row["off_by"]
        cells = [megabytes(row[column]) for column in FORMULA] + [
            megabytes(total),
            megabytes(row["measured"]),
        ]
        met = "yes" if abs(off) <= row["tolerance"] else "NO"
        table.rows.append([contender_named(row["contender"]).title, row["model"], *cells, f"{off:+.1%}", met])
    return table


def main(
    models: Annotated[str, typer.Option(help="Comma-separated shapes: tiny, 34m, 239m.")] = "34m,239m",
    rounds: Annotated[int, typer.Option(min=0, help="Rounds of timing; 0 measures memory alone.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of a contender in a round.")] = 3,
    only: Annotated[str, typer.Option(help="Comma-separated contenders, e.g. stage3-nvme.")] = "",
) -> None:
    """Measure offload against DeepSpeed's; write the result."""
    console = terminal()
    try:
        shapes = [shape_named(name) for name in models.split(",")]
        matches = select(OFFLOAD_MATCHES, [key for key in only.split(",") if key])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    keys = [*contenders_of(matches), "stage3"]
    compile_for(keys, console)
    with console.status("starting") as status:
        readings, failures = resident_readings(shapes, keys, steps, status.update)
    runs, rows, timing_failures = (
        measure(shapes, matches, rounds, steps, 2, console) if rounds else ([], [], [])
    )
    failures += timing_failures
    peaks, formula = peak_rows(readings), formula_rows(readings)
    tables = [peak_table(peaks), formula_table(formula), resident_table(readings)]
    if rows:
        tables = [ratios_table(rows, rounds, steps), *tables, times_table(runs)]
    data = {
        "environment": {**describe(), "NVMe folder": nvme_folder()},
        "comparisons": rows,
        "peaks": peaks,
        "formula": formula,
        "resident": readings,
        "runs": runs,
        "failures": failures,
    }
    missed = [*missed_bars(rows), *missed_peaks(peaks, formula)]
    conclude(console, "offload", "Host and NVMe offload", tables, data, [*failures, *missed])


if __name__ == "__main__":
    typer.run(main)
