"""Write the report with the plot, tables, the last output and the result of all checks."""

from __future__ import annotations

from pathlib import Path

from demo.page import write_page
from demo.report import markdown_table

from demo_offload.figure import draw_timeline
from demo_offload.settings import OffloadSettings
from demo_offload.verdict import HEADINGS, Result, megabytes, rows


def write_report(
    folder: Path, result: Result, settings: OffloadSettings, failures: list[str], seconds: float
) -> Path:
    """Write the report and its plot to `folder` and return the path of the page."""
    draw_timeline(result, folder / "timeline.png")
    return write_page(folder, _page(result, settings, failures, seconds))


def _page(result: Result, settings: OffloadSettings, failures: list[str], seconds: float) -> list[str]:
    lines = [f"- {failure}" for failure in failures]
    return [
        "# Demonstration of offload",
        "",
        f"A byte-level Llama with {result.parameters:,} parameters is trained in bf16 with fp32 master",
        f"weights and AdamW, on one window of {settings.window} bytes per step. The memory cap is",
        f"{megabytes(result.cap_bytes)} MB ({result.cap_name}): the memory of the interpreter and its",
        f"libraries, plus {settings.cap_bytes_per_parameter} bytes per parameter.",
        f"Training needs 16 bytes per parameter. The demonstration took {seconds:.0f} s.",
        "",
        *(["**Failed:**", "", *lines] if lines else ["**All checks passed.**"]),
        "",
        *markdown_table(HEADINGS, rows(result)),
        "",
        "`loss` is the loss of the last step. Sizes are peak values in MB (10⁶ bytes). `process` is",
        "resident memory. `device` and `host` are model state and staging buffers as counted by the",
        "engine. `NVMe` is the size of the files as reported by the file system.",
        *_shared(result),
        "The losses of both zero_ext runs must be bitwise equal.",
        "",
        "![memory per tier over time](timeline.png)",
        "",
        "## Loss of every step",
        "",
        *_losses(result),
        "",
        "## Bytes moved between tiers in the last step",
        "",
        *_moved(result),
        "",
        "## Last output of PyTorch alone",
        "",
        "```",
        *result.endings["plain"].last_words,
        f"({result.endings['plain']}, exit status {result.endings['plain'].status})",
        "```",
        "",
    ]


def _shared(result: Result) -> list[str]:
    if result.watched != "resident":
        return []
    return [
        "Resident memory includes library pages that other processes share. The memory cgroup may not be",
        "charged for them, so a process can exceed the cap by their size before it is killed.",
    ]


def _losses(result: Result) -> list[str]:
    ours, reference = result.losses("nvme"), result.losses("memory")
    lines = [
        [str(step), repr(one), repr(other), "yes" if one == other else "NO"]
        for step, (one, other) in enumerate(zip(ours, reference, strict=False), 1)
    ]
    return markdown_table(("step", "NVMe, capped", "in memory", "equal"), lines)


def _moved(result: Result) -> list[str]:
    moved = (result.records["nvme"] or {}).get("moved", {})
    lines = [
        [route, f"{count:,}", f"{count / result.parameters:.3f}"] for route, count in sorted(moved.items())
    ]
    return markdown_table(("from → to", "bytes", "bytes per parameter"), lines)
