"""Table, plots and report of the demonstration."""

from __future__ import annotations

from pathlib import Path

from demo.charts import save_chart
from demo.page import write_page
from demo.report import markdown_table

from demo_compressed.modes import MODES
from demo_compressed.outcome import Outcome, compare
from demo_compressed.settings import CompressedSettings
from zero_ext.config.plot_colors import SERIES

HEADINGS = (
    "mode",
    "held-out loss",
    "loss relative to uncompressed",
    "kB/step, warm-up",
    "kB/step, after warm-up",
    "reduction, after warm-up",
    "reduction, full run",
    "verdict",
)
COLORS = dict(zip(("adam", "onebit_adam", "zero_one_adam", "zero3", "zeropp"), SERIES, strict=True))
KILO = 1e3


def rows(
    outcomes: dict[str, Outcome], broken: dict[str, list[str]], settings: CompressedSettings
) -> list[list[str]]:
    """Return one row per mode, with cells in the order of HEADINGS."""
    compared, found = compare(outcomes, settings), []
    for name, outcome in outcomes.items():
        before = f"{outcome.mean_crossing(0, settings.warm_up) / KILO:,.0f}"
        after = f"{outcome.mean_crossing(settings.warm_up) / KILO:,.0f}"
        start, end = outcome.held_out[0][1], outcome.end
        relative = ["", "", ""]
        if name in compared:
            one = compared[name]
            relative = [f"{one.loss_ratio:.3f}", f"{one.fewer:.1f}", f"{one.fewer_in_all:.1f}"]
        found.append(
            [
                MODES[name].title,
                f"{start:.3f} → {end:.3f}",
                relative[0],
                before,
                after,
                *relative[1:],
                "FAILED" if broken[name] else "passed" if name in compared else "",
            ]
        )
    return found


def draw_loss(outcomes: dict[str, Outcome], unigram: float, path: Path) -> Path:
    """Plot the held-out loss over steps, one line per mode, and return `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.0, 4.4))
    for name, outcome in outcomes.items():
        style = "-" if MODES[name].against is None else "--"
        axes.plot(
            *zip(*outcome.held_out, strict=True),
            style,
            color=COLORS[name],
            label=MODES[name].title,
            marker=".",
        )
    axes.axhline(unigram, color="black", linewidth=0.8, linestyle="dotted", label="byte frequencies alone")
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss, nats per byte")
    axes.set_title("Full and compressed communication, same text and start")
    axes.legend()
    figure.tight_layout()
    save_chart(figure, path)
    pyplot.close(figure)
    return path


def draw_bytes(outcomes: dict[str, Outcome], settings: CompressedSettings, path: Path) -> Path:
    """Plot the bytes between nodes, per step on a logarithmic scale and cumulative, and return `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11.0, 4.4))
    for name, outcome in outcomes.items():
        total, summed = 0, []
        for count in outcome.crossing:
            total += count
            summed.append(total / 1e6)
        style = {"color": COLORS[name], "label": MODES[name].title, "linewidth": 1.2}
        steps = range(1, len(summed) + 1)
        left.plot(steps, [max(count, 1) / KILO for count in outcome.crossing], **style)
        right.plot(steps, summed, **style)
    left.set_yscale("log")
    left.set_ylabel("kB between nodes per step")
    right.set_ylabel("MB between nodes, cumulative")
    for axes in (left, right):
        axes.axvline(settings.warm_up, color="black", linewidth=0.8, linestyle="dotted")
        axes.set_xlabel("step (dotted line: end of the warm-up of the 1-bit modes)")
        axes.legend(fontsize=8)
    figure.tight_layout()
    save_chart(figure, path)
    pyplot.close(figure)
    return path


def write_report(
    folder: Path,
    outcomes: dict[str, Outcome],
    unigram: float,
    settings: CompressedSettings,
    broken: dict[str, list[str]],
    seconds: float,
) -> Path:
    """Write the report and its plots, and return the path of the page."""
    draw_loss(outcomes, unigram, folder / "loss.png")
    draw_bytes(outcomes, settings, folder / "bytes.png")
    lines = [f"- {MODES[name].title}: {line}" for name, found in broken.items() for line in found]
    return write_page(
        folder,
        [
            "# Demonstration of compressed communication",
            "",
            f"A byte-level Llama in bf16 with fp32 master weights is trained for {settings.steps} steps in",
            f"every mode, on {settings.ranks} ranks with {settings.ranks_per_node} ranks per simulated node.",
            "All modes begin with the same weights and see the same windows. The 1-bit modes send the first",
            f"{settings.warm_up} steps in full precision. The demonstration took {seconds:.0f} s.",
            "",
            *(["**Failed:**", "", *lines] if lines else ["**All checks passed.**"]),
            "",
            *markdown_table(HEADINGS, rows(outcomes, broken, settings)),
            "",
            "Losses are in nats per byte of Python's documentation, on documents that are not in the",
            f"training text. Byte frequencies alone reach {unigram:.3f}. The bytes per step are those that",
            "all nodes send to other nodes, including scales and padding. The reduction is the factor by",
            "which the bytes fall from the uncompressed mode, after the warm-up and in the full run.",
            "",
            "![loss](loss.png)",
            "",
            "![bytes](bytes.png)",
            "",
        ],
    )
