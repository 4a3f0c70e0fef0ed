"""The placement of the ranks as a table and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from zero_ext.plan.rank_placement import RankPlacement

_KINDS = {
    "pp": "pipeline stages",
    "dp": "replicas, sharded by ZeRO",
    "cp": "slices of a sequence",
    "tp": "slices of tensors",
}


def print_rank_placement(console: Console, placement: RankPlacement, ranks_per_host: int) -> None:
    """Print the time of each axis' traffic, in the best mapping and in a fixed order of the axes."""
    table = Table(title="Placement of the ranks")
    for heading in ("axis", "of", "ranks", "ms per step", f"as {placement.naive}, ms"):
        table.add_column(heading, justify="left" if heading in ("axis", "of") else "right")
    for axis, length in placement.mapping.sizes.items():
        seconds, counted = placement.seconds[axis], placement.naive_seconds[axis]
        table.add_row(axis, _KINDS[axis], str(length), f"{1e3 * seconds:,.1f}", f"{1e3 * counted:,.1f}")
    console.print(table)
    console.print(
        f"[green]Best: count ranks as {placement.mapping}[/], the last axis fastest, {ranks_per_host} to a "
        f"host. Communication is {placement.gain:.2f} times faster. "
        "Use make_mesh(..., mapping=best_mapping(...)[0])."
    )


def rank_placement_as_json(placement: RankPlacement) -> dict[str, Any]:
    """Return the same in seconds."""
    return {
        "mapping": [list(digit) for digit in placement.mapping.digits],
        "seconds": placement.seconds,
        "naive_mapping": [list(digit) for digit in placement.naive.digits],
        "naive_seconds": placement.naive_seconds,
    }
