"""Results of the runs, their checks, and the report with plots of the layouts."""

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
    "dense": "dense, full attention matrix",
    "sparse": "sparse, zero_ext",
    "flash": "dense, torch's flash kernel",
}
MEGA = 1e6


@dataclass(frozen=True)
class Result:
    """Exit states and records of all runs.

    `cap` has the bytes of the cap, the mechanism that enforces it, and the bytes of the interpreter and its
    libraries.
    """

    cap: tuple[int, str, int]
    endings: dict[str, Ending]
    records: dict[str, dict[str, Any] | None]
    unigram: float


def plots(folder: Path, settings: LongSettings) -> dict[str, Path]:
    """Plot the layout of every mode at the length of the demonstration, beginning with the trained one."""
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
    """Return one row per run, with cells in the order of HEADINGS."""
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
    """Return a message for each check that failed."""
    found = []
    if not result.endings["dense"].out_of_memory:
        found.append(
            f"dense attention under the cap: expected 'out of memory', got '{result.endings['dense']}'"
        )
    record = result.records["sparse"]
    if record is None:
        return [
            *found,
            f"sparse attention under the cap: expected 'trained', got '{result.endings['sparse']}'",
        ]
    before, after = record["held_out"]
    bar = min(settings.loss_bar, result.unigram)
    if not after < bar < before:
        found.append(
            f"held-out loss: expected a fall from above to below {bar:.3f} nats per byte, got "
            f"{before:.3f} → {after:.3f}"
        )
    return found


def write_report(
    folder: Path, result: Result, settings: LongSettings, broken: list[str], seconds: float
) -> Path:
    """Write the report and its plots, and return the path of the page."""
    shown = plots(folder, settings)
    cap, enforced_by, base = result.cap
    lines = [
        "# Demonstration of long sequences",
        "",
        f"A byte-level Llama with {settings.layers} layers and {settings.heads} heads is trained in fp32 on",
        f"windows of {settings.window:,} bytes. The memory cap is {cap / MEGA:,.0f} MB ({enforced_by}),",
        f"including {base / MEGA:,.0f} MB for the interpreter and its libraries. The demonstration took",
        f"{seconds:.0f} s.",
        "",
        *(["**Failed:**", "", *(f"- {each}" for each in broken)] if broken else ["**All checks passed.**"]),
        "",
        *markdown_table(HEADINGS, rows(result)),
        "",
        "Losses are in nats per byte of Python's documentation. The held-out loss is given before → after",
        "training, on documents that are not in the training text. Byte frequencies alone reach",
        f"{result.unigram:.3f} at best. Torch's flash kernel does not materialize the attention matrix",
        "either, so it fits under the cap. It computes every block at or below the diagonal.",
        "",
        "## Last output of dense attention",
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
