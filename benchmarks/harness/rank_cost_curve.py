"""The costs of one rank as N grows: measured at real and simulated sizes, fitted, and judged for flatness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.ranks import Team
from benchmarks.harness.report import Table
from benchmarks.harness.simulated_process import simulated

FLAT = 0.10
# A load parses a record for each slice of each rank: a minute and gigabytes from here on.
MOST_RANKS_OF_A_LOAD = 4096

# Column, key of RankCosts (or a sum of two), unit, and whether the bar holds for it.
Cost = tuple[str, tuple[str, ...], float, bool]
COSTS: tuple[Cost, ...] = (
    ("tensors MB", ("tensor_bytes",), 1e6, False),
    ("Python MB", ("object_bytes",), 1e6, False),
    ("both MB", ("tensor_bytes", "object_bytes"), 1e6, True),
    ("resident MB", ("resident_bytes",), 1e6, True),
    ("set-up Mopcodes", ("setup_opcodes",), 1e6, True),
    ("set-up ms", ("setup_seconds",), 1e-3, False),
    ("collectives", ("collectives",), 1, False),
    ("messages", ("messages",), 1, False),
    ("sent MB", ("bytes_sent",), 1e6, False),
    ("plan save ms", ("save_seconds",), 1e-3, False),
    ("save MB", ("save_bytes",), 1e6, False),
    ("plan load ms", ("load_seconds",), 1e-3, False),
    ("load MB", ("load_bytes",), 1e6, False),
    ("manifest MB", ("manifest_bytes",), 1e6, False),
)


@dataclass(frozen=True)
class Growth:
    """How a cost grows over the simulated sizes: the exponent of N, and the largest value over the smallest.

    `met` says whether the bar holds, and is None for a cost without one.
    """

    cost: str
    slope: float
    spread: float
    met: bool | None


def value(costs: dict[str, Any], keys: Sequence[str]) -> float | None:
    """Return the sum of `keys`; None if one was not measured."""
    found = [costs[key] for key in keys]
    return None if None in found else sum(found)


def measure_simulated(shape: str, stage: int, ranks: int) -> dict[str, Any]:
    """Return the costs of rank 0 of `ranks` simulated ones; RuntimeError with its last words if it fails."""
    return simulated(
        "rank_costs",
        f"stage {stage} on {ranks} simulated ranks",
        shape_name=shape,
        stage=stage,
        ranks=ranks,
        plans_load=ranks <= MOST_RANKS_OF_A_LOAD,
    )


def measure_real(shape: str, stage: int, ranks: int) -> dict[str, Any]:
    """Return the costs of rank 0 of `ranks` processes; TeamFailure if one fails."""
    with Team(f"{ranks} ranks", ranks, threads=1, worker="benchmarks.harness.rank_costs") as team:
        found: dict[str, Any] = team.ask("measure", shape=shape, stage=stage, ranks=ranks)[0]
    return found


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the least-squares exponent of `y` over `x` on logarithmic axes."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    mean_x, mean_y = (sum(each) / len(logs) for each in zip(*logs, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)


def growth(curve: Sequence[dict[str, Any]]) -> list[Growth]:
    """Return the growth of every cost over the simulated sizes of `curve`, at least two."""
    found = []
    for name, keys, _, has_bar in COSTS:
        every = [(each["ranks"], value(each, keys)) for each in curve if each["is_simulated"]]
        # A growth of the resident set below the resolution of a page may be zero.
        points = [(ranks, measured) for ranks, measured in every if measured]
        if len(points) < 2:
            continue
        values = [measured for _, measured in points]
        spread = max(values) / min(values)
        found.append(Growth(name, slope(points), spread, spread <= 1 + FLAT if has_bar else None))
    return found


def cost_table(curve: Sequence[dict[str, Any]]) -> Table:
    """Costs of each size."""
    first = curve[0]
    table = Table(
        f"Costs of one rank besides its shards, Llama {first['shape']}, stage {first['stage']}",
        ("ranks", "shards MB", *(name for name, *_ in COSTS)),
        note="One model of fixed size, so that the number of units stays the same and shards shrink. MB is"
        " 10⁶ bytes. Tensors and Python's objects after set-up, resident growth after two steps, each"
        " without the shards. Opcodes of prepare. Messages and bytes of a step: each rank sends to each"
        " other rank. Plans of checkpoints have the growth of the resident peak on rank 0, which writes the"
        " manifest. Processor time.",
    )
    for each in curve:
        row = [f"{each['ranks']:,}" + ("" if each["is_simulated"] else " real")]
        row.append(f"{each['shard_bytes'] / 1e6:,.2f}")
        for _, keys, unit, _ in COSTS:
            measured = value(each, keys)
            row.append("-" if measured is None else _figure(measured, unit))
        table.rows.append(row)
    return table


def growth_table(found: Sequence[Growth]) -> Table:
    """Exponents and spreads."""
    table = Table(
        "Growth over the simulated ranks",
        ("cost", "slope", "largest / smallest", f"flat within {FLAT:.0%}"),
        note="Slope: the exponent of N by least squares on logarithmic axes. 0 is flat, 1 is linear.",
    )
    for each in found:
        verdict = "" if each.met is None else "yes" if each.met else "no"
        table.rows.append([each.cost, f"{each.slope:+.3f}", f"{each.spread:,.3f}", verdict])
    return table


def _figure(measured: float, unit: float) -> str:
    return f"{measured:,}" if unit == 1 else f"{measured / unit:,.2f}"
