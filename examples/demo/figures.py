"""Plots of loss and memory for the report."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from demo.charts import save_chart
from demo.comparison import MEGA, STATE_KINDS, Row
from demo.settings import SETTINGS
from demo.training_run import TrainingRun
from zero_ext.config.plot_colors import BLUE, KINDS, VERMILION

NAMES = {
    "params": "parameters (bf16)",
    "grads": "gradients (bf16)",
    "optimizer": "optimizer (fp32 master, moments)",
}


def _axes(title: str) -> Axes:
    axes = pyplot.figure(figsize=(8, 4.8), layout="constrained").add_subplot()
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


def _save(axes: Axes, path: Path) -> None:
    figure = axes.get_figure(root=True)
    assert figure is not None
    save_chart(figure, path)
    pyplot.close(figure)


def draw_loss(run: TrainingRun, path: Path) -> None:
    """Plot the training loss of every step, the measured held-out losses and their two upper bounds."""
    axes = _axes(f"Byte-level Llama, {run.parameters / MEGA:.0f}M parameters, ZeRO-3: loss")
    axes.plot(
        range(1, len(run.losses) + 1), run.losses, color=BLUE, linewidth=1.3, label="training, each step"
    )
    steps = [0, SETTINGS.save_at, SETTINGS.steps]
    held_out = [run.held_out_start, run.held_out_saved, run.held_out_end]
    axes.plot(steps, held_out, "o", color=VERMILION, markersize=7, label="held-out", zorder=3)
    for step, loss in zip(steps, held_out, strict=True):
        axes.annotate(
            f"{loss:.2f}", (step, loss), textcoords="offset points", xytext=(6, -15), color=VERMILION
        )
    bars = (
        (run.unigram_entropy, "byte-unigram entropy", "--"),
        (SETTINGS.loss_bar * run.held_out_start, f"{SETTINGS.loss_bar:g} × held-out start", ":"),
    )
    for height, name, style in bars:
        axes.axhline(height, color="#555555", linestyle=style, linewidth=1.1, label=f"{name}: {height:.2f}")
    first, second = run.ranks
    axes.axvline(SETTINGS.save_at, color="#999999", linewidth=1)
    axes.text(SETTINGS.save_at - 1, max(run.losses), f"{first} ranks", ha="right", va="top", color="#555555")
    axes.text(SETTINGS.save_at + 1, max(run.losses), f"{second} rank", ha="left", va="top", color="#555555")
    axes.set_xlim(-3, SETTINGS.steps * 1.06)
    axes.set_xlabel("step")
    axes.set_ylabel("nats per byte")
    axes.legend(frameon=False, loc="upper center")
    _save(axes, path)


def draw_memory(rows: list[Row], path: Path) -> None:
    """Plot one bar per run, stacked by state kind, with a black line at the value of the formula."""
    axes = _axes("Model state per rank: measured (bars) and by formula (lines)")
    axes.grid(axis="x", visible=False)
    bases = [0.0] * len(rows)
    for kind in STATE_KINDS:
        heights = [getattr(row.measured, kind) / MEGA for row in rows]
        bars = axes.bar(range(len(rows)), heights, 0.62, bottom=bases, color=KINDS[kind], label=NAMES[kind])
        axes.bar_label(
            bars, [f"{height:.0f}" for height in heights], label_type="center", color="white", fontsize=9
        )
        bases = [base + height for base, height in zip(bases, heights, strict=True)]
    for index, row in enumerate(rows):
        height = row.formula.total / MEGA
        axes.hlines(
            height, index - 0.38, index + 0.38, colors="black", label="formula" if index == 0 else None
        )
        axes.annotate(
            f"{row.measured.total / MEGA:.0f}",
            (index, bases[index]),
            textcoords="offset points",
            xytext=(0, 4),
            ha="center",
            fontweight="bold",
        )
    labels = [f"{row.name}\n{row.ranks} rank{'s' * (row.ranks > 1)}" for row in rows]
    axes.set_xticks(range(len(rows)), labels)
    axes.set_ylim(0, max(bases) * 1.32)
    axes.set_ylabel("MB (10⁶ bytes)")
    axes.legend(frameon=False, loc="upper right", ncols=2)
    _save(axes, path)
