"""The report: pictures, tables, sample and verdict in one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from demo.comparison import HEADINGS, STATE_KINDS, Row, cells, megabytes
from demo.figures import draw_loss, draw_memory
from demo.page import write_page
from demo.settings import SETTINGS
from demo.training_run import TrainingRun


def write_report(
    folder: Path, run: TrainingRun, rows: list[Row], failures: list[str], seconds: float
) -> Path:
    """Writes the report and its pictures into `folder`; returns the page's path."""
    draw_loss(run, folder / "loss.png")
    draw_memory(rows, folder / "memory.png")
    return write_page(folder, _page(run, rows, failures, seconds))


def summary(run: TrainingRun) -> list[str]:
    """The training run in a few lines of plain text."""
    first, second = run.ranks
    return [
        f"held-out loss at the start          {run.held_out_start:.3f} nats per byte",
        f"after {SETTINGS.save_at} steps on {first} ranks           {run.held_out_saved:.5f}",
        f"the same, resumed on {second} rank         {run.held_out_resumed:.5f}",
        f"after {SETTINGS.steps} steps                      {run.held_out_end:.3f}",
        f"bar: byte-unigram entropy           {run.unigram_entropy:.3f}",
        f"bar: {SETTINGS.loss_bar:g} x start                    {SETTINGS.loss_bar * run.held_out_start:.3f}",
    ]


def _page(run: TrainingRun, rows: list[Row], failures: list[str], seconds: float) -> list[str]:
    return [
        "# Demonstration of zero_ext",
        "",
        f"A byte-level Llama with {run.parameters:,} parameters, trained on the documentation that Python",
        f"carries, bf16 with fp32 master weights. The whole took {seconds:.0f} s.",
        "",
        "**" + ("Failed:** " + "; ".join(failures) if failures else "All checks passed.**"),
        "",
        "## Training with ZeRO-3",
        "",
        "```",
        *summary(run),
        "```",
        "",
        "![loss](loss.png)",
        "",
        f"A sample at the end, unjudged (drawn at temperature 0.8 after {SETTINGS.steps} steps):",
        "",
        "```",
        *run.sample.replace("```", "'''").splitlines(),
        "```",
        "",
        "## The same steps at every stage",
        "",
        f"{SETTINGS.compared_steps} steps from the same start on the same {SETTINGS.global_batch} windows of "
        f"{SETTINGS.window} bytes a step; `×` counts ranks.",
        "`state` is what a rank keeps of parameters, gradients and optimizer, by the engine's ledger, and",
        "`sent` what it sends in a step, both in MB (10⁶ bytes) beside the formulas. All stages' losses must",
        f"be equal to the last bit; the plain loop's may differ by {SETTINGS.plain_tolerance:g} (relative):",
        "AdamW's last fp32 bit differs, and with it the rounding of a few weights to bf16.",
        "",
        *markdown_table(HEADINGS, [cells(row, rows[0]) for row in rows]),
        "",
        "Of the state, by kind:",
        "",
        *markdown_table(("run", *STATE_KINDS), [_kinds(row) for row in rows]),
        "",
        "![memory](memory.png)",
        "",
    ]


def _kinds(row: Row) -> list[str]:
    return [f"{row.name} ×{row.ranks}", *(megabytes(getattr(row.measured, kind)) for kind in STATE_KINDS)]


def markdown_table(headings: Sequence[str], lines: list[list[str]]) -> list[str]:
    """The lines of a table, its first column to the left and the others to the right."""
    return [
        "| " + " | ".join(headings) + " |",
        "|---" + "|---:" * (len(headings) - 1) + "|",
        *("| " + " | ".join(line) + " |" for line in lines),
    ]
