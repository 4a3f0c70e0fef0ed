"""The report: picture, table, last words and verdict in one page."""

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
    """Writes the report and its picture into `folder`; returns the page's path."""
    draw_timeline(result, folder / "timeline.png")
    return write_page(folder, _page(result, settings, failures, seconds))


def _page(result: Result, settings: OffloadSettings, failures: list[str], seconds: float) -> list[str]:
    return [
        "# Demonstration of the tiers",
        "",
        f"A byte-level Llama with {result.parameters:,} parameters: bf16, fp32 master weights, AdamW, one",
        f"window of {settings.window} bytes a step. The cap is {megabytes(result.cap_bytes)} MB by",
        f"{result.cap_name}: what interpreter and libraries take, and "
        f"{settings.cap_bytes_per_parameter} bytes for every parameter,",
        f"where training needs 16. The whole took {seconds:.0f} s.",
        "",
        "**Failed:** " + "; ".join(failures) if failures else "**All checks passed.**",
        "",
        *markdown_table(HEADINGS, rows(result)),
        "",
        "`loss` is that of the last step. Sizes are the most at any time, in MB (10⁶ bytes): `process` is",
        "resident memory, `device` and `host` are model state and staging by the program's own count, `NVMe`",
        "the files by that of the file system.",
        *_shared(result),
        "The losses of both zero_ext runs must be equal to the last bit.",
        "",
        "![memory by tier over time](timeline.png)",
        "",
        "## The losses of every step",
        "",
        *_losses(result),
        "",
        "## Moved in the last step",
        "",
        *_moved(result),
        "",
        "## The last words of PyTorch alone",
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
        "Resident memory includes pages of libraries that other processes have read as well. The group may",
        "not be charged for them, so that a process can pass the cap by their size before it is killed.",
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
    return markdown_table(("from → to", "bytes", "bytes a parameter"), lines)
