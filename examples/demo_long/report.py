"""What the runs showed: table, broken promises, and a page with the pictures of the layouts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.page import write_page
from demo.report import markdown_table

from demo_long.processes import Ending
from demo_long.settings import LongSettings
from zero_ext.attention import build_layout
from zero_ext.attention.plot_layout import plot_layout
from zero_ext.config import SparseAttentionConfig

HEADINGS = ("attention", "under the cap", "steps", "s/step", "peak MB", "loss, last step", "held-out loss")
TITLES = {
    "dense": "dense, as a matrix of weights",
    "sparse": "sparse, zero_ext",
    "flash": "dense, torch's flash kernel",
}
MEGA = 1e6


@dataclass(frozen=True)
class Result:
    """Endings and records of all runs; `cap` is bytes, what enforces it, and what interpreter and libraries
    take of it."""

    cap: tuple[int, str, int]
    endings: dict[str, Ending]
    records: dict[str, dict[str, Any] | None]
    unigram: float


def plots(folder: Path, settings: LongSettings) -> dict[str, Path]:
    """A picture of every mode's layout at the demonstration's length; the trained one first."""
    modes: dict[str, dict[str, Any]] = {
        "fixed": settings.layout,
        "variable": {"mode": "variable", "local_window_blocks": [4, 8, 16], "global_block_indices": [0, 1]},
        "bigbird": {"mode": "bigbird", "num_random_blocks": 3, "num_sliding_window_blocks": 5},
        "bslongformer": {"mode": "bslongformer", "global_block_indices": [0, 64, 128]},
        "local_sliding_window": {"mode": "local_sliding_window", "num_sliding_window_blocks": 17},
    }
    found = {}
    for mode, values in modes.items():
        policy = SparseAttentionConfig.from_mapping({"block": settings.block, **values})
        layout = build_layout(policy, settings.heads, settings.window)
        found[mode] = plot_layout(
            layout, folder / f"layout-{mode}.png", f"{mode}, {settings.window:,} tokens"
        )
    return found


def rows(result: Result) -> list[list[str]]:
    """A row for each run."""
    found = []
    for name, title in TITLES.items():
        record, ending = result.records[name], result.endings[name]
        if record is None:
            found.append([title, str(ending), "0", "", "", "", ""])
            continue
        steps = record["seconds"]
        held = [f"{value:.3f}" for value in record["held_out"] if value is not None]
        found.append(
            [
                title,
                str(ending),
                str(len(steps)),
                f"{sorted(steps)[len(steps) // 2]:.1f}",
                f"{record['peak_bytes'] / MEGA:,.0f}",
                f"{record['losses'][-1]:.3f}",
                " → ".join(held),
            ]
        )
    return found


def failures(result: Result, settings: LongSettings) -> list[str]:
    """Every broken promise in words."""
    found = []
    if not result.endings["dense"].out_of_memory:
        found.append(f"dense attention was to run out of memory under the cap, but {result.endings['dense']}")
    record = result.records["sparse"]
    if record is None:
        return [*found, f"sparse attention was to train under the cap, but {result.endings['sparse']}"]
    before, after = record["held_out"]
    bar = min(settings.loss_bar, result.unigram)
    if not after < bar < before:
        found.append(
            f"the held-out loss went from {before:.3f} to {after:.3f}, and was to end below {bar:.3f} nats "
            "per byte"
        )
    return found


def write_report(
    folder: Path, result: Result, settings: LongSettings, broken: list[str], seconds: float
) -> Path:
    """Writes the report and its pictures; returns the page's path."""
    shown = plots(folder, settings)
    cap, enforced_by, base = result.cap
    lines = [
        "# Demonstration of long sequences",
        "",
        f"A byte-level Llama of {settings.layers} layers and {settings.heads} heads, fp32, trained on",
        f"windows of {settings.window:,} bytes. The cap is {cap / MEGA:,.0f} MB by {enforced_by}, of which",
        f"interpreter and libraries take {base / MEGA:,.0f}. The whole took {seconds:.0f} s.",
        "",
        "**Failed:** " + "; ".join(broken) if broken else "**All checks passed.**",
        "",
        *markdown_table(HEADINGS, rows(result)),
        "",
        "Losses are nats per byte of Python's documentation; the held-out one before → after, on documents",
        f"never trained on. Byte frequencies alone reach {result.unigram:.3f} at best. Torch's flash kernel",
        "keeps no matrix either: it fits, and computes every block at or below the diagonal.",
        "",
        "## The last words of dense attention",
        "",
        "```",
        *result.endings["dense"].last_words,
        f"({result.endings['dense']}, exit status {result.endings['dense'].status})",
        "```",
        "",
        "## Layouts",
        "",
        *(f"![{mode}]({path.name})" for mode, path in shown.items()),
        "",
    ]
    return write_page(folder, lines)
