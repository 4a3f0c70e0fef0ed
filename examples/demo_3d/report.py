"""Results of the layouts, their checks, plots and the report."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.charts import save_chart
from demo.page import write_page
from demo.record import read_records
from demo.report import markdown_table

from zero_ext.parallel.pipeline import Slot, plot_timeline

from .settings import ALONE, LAYOUTS, ThreeDSettings

HEADINGS = (
    "layout",
    "last loss",
    "largest difference from one process",
    "parameters per rank",
    "model state per rank, MB",
    "verdict",
)
TIMELINE = "pp_dp"


@dataclass(frozen=True)
class Outcome:
    """Result of one layout: the loss of every step, the median step time, and the maximum over ranks."""

    losses: list[float]
    seconds: float
    parameters: int
    state_bytes: int
    records: list[dict[str, Any]]

    @staticmethod
    def read(folder: Path, name: str) -> Outcome:
        """Load and join the records of all ranks.

        Raises:
            RuntimeError: The ranks recorded different losses.
        """
        records = read_records(folder, name)
        if any(record["losses"] != records[0]["losses"] for record in records):
            raise RuntimeError(f"{name}: expected the same losses on all ranks, got different ones.")
        return Outcome(
            records[0]["losses"],
            statistics.median(records[0]["seconds"]),
            max(record.get("parameters", 0) for record in records),
            max(record.get("state_bytes", 0) for record in records),
            records,
        )


def difference(one: list[float], other: list[float]) -> float:
    """Return the largest relative difference of two lists of losses at the same step."""
    return max(abs(own / its - 1) for own, its in zip(one, other, strict=True))


def failures(outcomes: dict[str, Outcome], settings: ThreeDSettings) -> dict[str, list[str]]:
    """Return the messages of the failed checks for each layout."""
    found: dict[str, list[str]] = {name: [] for name in LAYOUTS}
    alone = outcomes[ALONE].losses
    for name in LAYOUTS:
        away = difference(outcomes[name].losses, alone)
        if not away <= settings.loss_tolerance:
            found[name].append(
                f"a loss differs from one process by {away:.2e} (relative), more than "
                f"{settings.loss_tolerance:g}"
            )
        if not outcomes[name].losses[-1] < alone[0]:
            found[name].append(f"the loss ended at {outcomes[name].losses[-1]:.3f}, above its start")
    return found


def rows(outcomes: dict[str, Outcome], broken: dict[str, list[str]]) -> list[list[str]]:
    """Return one row per layout, with cells in the order of HEADINGS."""
    alone = outcomes[ALONE]
    found = [["one process, PyTorch alone", f"{alone.losses[-1]:.5f}", "", "", "", ""]]
    for name, layout in LAYOUTS.items():
        outcome = outcomes[name]
        found.append(
            [
                layout.title,
                f"{outcome.losses[-1]:.5f}",
                f"{difference(outcome.losses, alone.losses):.1e}",
                f"{outcome.parameters:,}",
                f"{outcome.state_bytes / 1e6:.1f}",
                "FAILED" if broken[name] else "passed",
            ]
        )
    return found


def draw_losses(outcomes: dict[str, Outcome], path: Path) -> Path:
    """Plot the losses of all layouts and their difference from one process, and return `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12.0, 4.4))
    alone = outcomes[ALONE].losses
    steps = range(1, len(alone) + 1)
    left.plot(steps, alone, color="black", linewidth=2.5, alpha=0.4, label="one process")
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        losses = outcomes[name].losses
        left.plot(steps, losses, "--", color=f"C{number}", linewidth=1.0, label=layout.title)
        away = [abs(own / its - 1) + 1e-9 for own, its in zip(losses, alone, strict=True)]
        right.plot(steps, away, color=f"C{number}", linewidth=1.0, label=layout.title)
    left.set_ylabel("loss, nats per byte")
    right.set_ylabel("relative difference from one process")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.legend(fontsize=8)
    figure.tight_layout()
    save_chart(figure, path)
    pyplot.close(figure)
    return path


def write_report(
    folder: Path,
    outcomes: dict[str, Outcome],
    settings: ThreeDSettings,
    broken: dict[str, list[str]],
    seconds: float,
) -> Path:
    """Write the report and its plots, and return the path of the page."""
    draw_losses(outcomes, folder / "loss.png")
    first = [record for record in outcomes[TIMELINE].records if record["coordinate"]["dp"] == 0]
    slots = [[Slot(**slot) for slot in record["slots"]] for record in first]
    plot_timeline(slots, folder / "timeline.png", f"{LAYOUTS[TIMELINE].title}: one step of one replica")
    lines = [f"- {LAYOUTS[name].title}: {line}" for name, found in broken.items() for line in found]
    return write_page(
        folder,
        [
            "# Demonstration of 3D parallelism",
            "",
            f"A byte-level transformer in fp32 is trained for {settings.steps} steps of {settings.batch} "
            f"windows with gradient clipping, on {settings.ranks} ranks",
            "in every layout. The losses are compared with the same steps in one process. The demonstration",
            f"took {seconds:.0f} s.",
            "",
            *(["**Failed:**", "", *lines] if lines else ["**All checks passed.**"]),
            "",
            *markdown_table(HEADINGS, rows(outcomes, broken)),
            "",
            "The largest difference is the relative difference of the loss, maximum over all steps.",
            "",
            "![loss](loss.png)",
            "",
            "![timeline](timeline.png)",
            "",
        ],
    )
