"""The verdict table, the two pictures and the page of the demonstration."""

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
    "of uncompressed",
    "kB a step, warm-up",
    "after it",
    "times fewer",
    "in all",
    "verdict",
)
COLORS = dict(zip(("adam", "onebit_adam", "zero_one_adam", "zero3", "zeropp"), SERIES, strict=True))
KILO = 1e3


def rows(
    outcomes: dict[str, Outcome], broken: dict[str, list[str]], settings: CompressedSettings
) -> list[list[str]]:
    """A row for each mode, cells as HEADINGS has them."""
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
                "FAILED" if broken[name] else "kept" if name in compared else "",
            ]
        )
    return found


def draw_loss(outcomes: dict[str, Outcome], unigram: float, path: Path) -> Path:
    """Held-out loss over steps, a line for each mode; returns `path`."""
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
    axes.set_title("The same text and start, full and compressed communication")
    axes.legend()
    figure.tight_layout()
    save_chart(figure, path)
    pyplot.close(figure)
    return path


def draw_bytes(outcomes: dict[str, Outcome], settings: CompressedSettings, path: Path) -> Path:
    """Bytes that crossed between nodes: step by step, logarithmic, and summed up; returns `path`."""
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
    left.set_ylabel("kB between nodes in a step")
    right.set_ylabel("MB between nodes so far")
    for axes in (left, right):
        axes.axvline(settings.warm_up, color="black", linewidth=0.8, linestyle="dotted")
        axes.set_xlabel("step; dotted: the one-bit modes' warm-up ends")
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
    """Writes the report and its pictures; returns the page's path."""
    draw_loss(outcomes, unigram, folder / "loss.png")
    draw_bytes(outcomes, settings, folder / "bytes.png")
    lines = [f"- {MODES[name].title}: {line}" for name, found in broken.items() for line in found]
    return write_page(
        folder,
        [
            "# Demonstration of compressed communication",
            "",
            f"A byte-level Llama, bf16 with fp32 masters, trained for {settings.steps} steps on",
            f"{settings.ranks} ranks, {settings.ranks_per_node} on each simulated node, in every mode",
            "from the same start on the same windows. The one-bit modes send",
            f"{settings.warm_up} steps in full precision first. The whole took {seconds:.0f} s.",
            "",
            *(["**Failed:**", "", *lines] if lines else ["**All promises were kept.**"]),
            "",
            *markdown_table(HEADINGS, rows(outcomes, broken, settings)),
            "",
            "Losses are nats per byte of Python's documentation, on documents never trained on; byte",
            f"frequencies alone reach {unigram:.3f}. Bytes are what all nodes together send to others in",
            "a step, scales and padding included; times fewer: after the warm-up, and in the whole run.",
            "",
            "![loss](loss.png)",
            "",
            "![bytes](bytes.png)",
            "",
        ],
    )
