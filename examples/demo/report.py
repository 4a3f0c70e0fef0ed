"""Write the report with plots, tables, a text sample and the result of all checks."""

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
    """Write the report and its plots to `folder` and return the path of the page."""
    draw_loss(run, folder / "loss.png")
    draw_memory(rows, folder / "memory.png")
    return write_page(folder, _page(run, rows, failures, seconds))


def summary(run: TrainingRun) -> list[str]:
    """Return a summary of the training run as lines of plain text."""
    first, second = run.ranks
    return [
        f"held-out loss at the start          {run.held_out_start:.3f} nats per byte",
        f"after {SETTINGS.save_at} steps on {first} ranks           {run.held_out_saved:.5f}",
        f"after resuming on {second} rank            {run.held_out_resumed:.5f}",
        f"after {SETTINGS.steps} steps                      {run.held_out_end:.3f}",
        f"bound: byte-unigram entropy         {run.unigram_entropy:.3f}",
        f"bound: {SETTINGS.loss_bar:g} x start                  {SETTINGS.loss_bar * run.held_out_start:.3f}",
    ]


def _page(run: TrainingRun, rows: list[Row], failures: list[str], seconds: float) -> list[str]:
    lines = [f"- {failure}" for failure in failures]
    return [
        "# Demonstration of zero_ext",
        "",
        f"A byte-level Llama with {run.parameters:,} parameters is trained on the documentation that ships",
        f"with Python, in bf16 with fp32 master weights. The demonstration took {seconds:.0f} s.",
        "",
        *(["**Failed:**", "", *lines] if lines else ["**All checks passed.**"]),
        "",
        "## Training with ZeRO-3",
        "",
        "```",
        *summary(run),
        "```",
        "",
        "![loss](loss.png)",
        "",
        f"A sample of generated text at temperature 0.8 after {SETTINGS.steps} steps, which is not checked:",
        "",
        "```",
        *run.sample.replace("```", "'''").splitlines(),
        "```",
        "",
        "## The same steps at every stage",
        "",
        f"Each run trains {SETTINGS.compared_steps} steps from the same start, on the same "
        f"{SETTINGS.global_batch} windows of {SETTINGS.window} bytes per step.",
        "The number after `×` is the number of ranks. `state` is the size of parameters, gradients and",
        "optimizer state per rank, from the engine's memory breakdown. `sent` is the traffic per rank and",
        "step. Both are in MB (10⁶ bytes), and each is followed by the value of its formula. The losses of",
        "all stages must be bitwise equal. Those of the plain loop may differ by a relative",
        f"{SETTINGS.plain_tolerance:g}, because torch's AdamW differs in the last bit of fp32, which changes",
        "the rounding of a few weights to bf16.",
        "",
        *markdown_table(HEADINGS, [cells(row, rows[0]) for row in rows]),
        "",
        "Model state by kind, in MB per rank:",
        "",
        *markdown_table(("run", *STATE_KINDS), [_kinds(row) for row in rows]),
        "",
        "![memory](memory.png)",
        "",
    ]


def _kinds(row: Row) -> list[str]:
    return [f"{row.name} ×{row.ranks}", *(megabytes(getattr(row.measured, kind)) for kind in STATE_KINDS)]


def markdown_table(headings: Sequence[str], lines: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table, with all columns but the first right-aligned."""
    return [
        "| " + " | ".join(headings) + " |",
        "|---" + "|---:" * (len(headings) - 1) + "|",
        *("| " + " | ".join(line) + " |" for line in lines),
    ]
