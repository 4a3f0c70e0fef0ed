"""The places of the ranks as a table and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from zero_ext.plan.rank_placement import Places

_KINDS = {
    "pp": "pipeline stages",
    "dp": "replicas, sharded by ZeRO",
    "cp": "parts of a sequence",
    "tp": "parts of tensors",
}


def print_places(console: Console, places: Places, ranks_per_host: int) -> None:
    """What the exchanges of each axis take, where they should stand and counted through."""
    table = Table(title="Places of the ranks")
    for heading in ("axis", "of", "ranks", "ms a step", f"counted as {places.naive}, ms"):
        table.add_column(heading, justify="left" if heading in ("axis", "of") else "right")
    for axis, length in places.mapping.sizes.items():
        seconds, counted = places.seconds[axis], places.naive_seconds[axis]
        table.add_row(axis, _KINDS[axis], str(length), f"{1e3 * seconds:,.1f}", f"{1e3 * counted:,.1f}")
    console.print(table)
    console.print(
        f"[green]count ranks as {places.mapping}[/], the fastest last, {ranks_per_host} to a host: exchanges "
        f"take {places.gain:.2f} times less. make_mesh(..., mapping=best_mapping(...)[0]) does.",
        soft_wrap=True,
    )


def places_as_json(places: Places) -> dict[str, Any]:
    """The same in seconds."""
    return {
        "mapping": [list(digit) for digit in places.mapping.digits],
        "seconds": places.seconds,
        "naive_mapping": [list(digit) for digit in places.naive.digits],
        "naive_seconds": places.naive_seconds,
    }
