"""1,024 simulated ranks: bytes of a rank against the formula, and the time to set up a 7B model. Then the
costs of one rank besides its shards as N grows. Set-up and memory must stay flat.

Run from the repository root: python -m benchmarks.scale [--model 7b] [--ranks 1024] [--stages 1,2,3]
    [--curve-model 239m] [--curve-real 2,4,8] [--curve-ranks 64,256,1024,4096,16384]
"""

import subprocess
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.harness.environment import describe
from benchmarks.harness.formula import STATE_KINDS, relative_excess, state_bytes
from benchmarks.harness.plots import plot_rank_costs
from benchmarks.harness.rank_cost_curve import (
    cost_table,
    growth,
    growth_table,
    measure_real,
    measure_simulated,
)
from benchmarks.harness.report import Table, conclude, megabytes, terminal
from benchmarks.harness.shapes import shape_named
from benchmarks.harness.simulated_process import simulated

SETUP_BAR_SECONDS = 60.0
# Shards are padded to equal, aligned lengths: at most 64 bytes x ranks a unit, here under a thousandth.
BYTES_TOLERANCE = 0.001


def simulate_rank(shape: str, stage: int, ranks: int) -> dict[str, Any]:
    """Rank 0 of `ranks`; RuntimeError with its last words if it fails."""
    what = f"stage {stage} on {ranks} simulated ranks"
    return simulated("simulated", what, shape_name=shape, stage=stage, ranks=ranks)


def judge(result: dict[str, Any]) -> dict[str, Any]:
    """The result with its formula, the worst relative deviation of a state kind, and the bars."""
    formula = state_bytes(shape_named(result["shape"]).parameters, result["stage"], result["ranks"])
    excess = max((relative_excess(result["breakdown"][kind], formula[kind]) for kind in STATE_KINDS), key=abs)
    seconds = result["model_seconds"] + result["prepare_seconds"]
    return {
        **result,
        "formula": formula,
        "excess": excess,
        "setup_seconds": seconds,
        "bytes_met": abs(excess) <= BYTES_TOLERANCE,
        "setup_met": seconds < SETUP_BAR_SECONDS,
    }


def scale_table(results: list[dict[str, Any]], ranks: int) -> Table:
    """Bytes of a rank beside the formula, and set-up time."""
    table = Table(
        f"One of {ranks:,} simulated ranks",
        (
            "stage",
            *STATE_KINDS,
            "sum",
            "formula",
            "off by",
            "equal",
            "other",
            "tensors",
            "set-up s",
            "< 60 s",
        ),
        note="MB (10⁶) of rank 0 by the ledger; fake process group, model on the meta device, values left"
        " empty. Off by: the worst state kind, padding included (equal: within 0.1%). Set-up: model and"
        " prepare. Tensors: storages the garbage collector finds, to hold against sum + other.",
    )
    for result in results:
        state = sum(result["breakdown"][kind] for kind in STATE_KINDS)
        table.rows.append(
            [
                f"{result['shape']} stage {result['stage']}",
                *(f"{result['breakdown'][kind] / 1e6:,.2f}" for kind in STATE_KINDS),
                f"{state / 1e6:,.2f}",
                f"{sum(result['formula'].values()) / 1e6:,.2f}",
                f"{result['excess']:+.4%}",
                "yes" if result["bytes_met"] else "no",
                megabytes(sum(result["breakdown"].values()) - state),
                megabytes(result["live_tensors"]),
                f"{result['setup_seconds']:.1f}",
                "yes" if result["setup_met"] else "no",
            ]
        )
    return table


def measure_curve(
    console: Console, shape: str, stage: int, real: list[int], ranks: list[int], failures: list[str]
) -> list[dict[str, Any]]:
    """Return the costs at every size, real ones first; what fails is added to `failures`."""
    sizes: list[tuple[Callable[[str, int, int], dict[str, Any]], int]] = [
        *((measure_real, each) for each in real),
        *((measure_simulated, each) for each in ranks),
    ]
    curve = []
    for measure, size in sizes:
        with console.status(f"costs of one of {size:,} ranks"):
            try:
                curve.append(measure(shape, stage, size))
            except (RuntimeError, subprocess.SubprocessError) as error:
                failures.append(str(error))
    return curve


def numbers(text: str) -> list[int]:
    """The comma-separated numbers of an option; none of an empty one."""
    return [int(word) for word in text.split(",") if word]


def shape_option(name: str) -> str:
    """The name of a known shape; BadParameter for another."""
    try:
        return shape_named(name).name
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def main(
    model: Annotated[str, typer.Option(help="Shape of the model: tiny, 34m, 239m, 7b.")] = "7b",
    ranks: Annotated[int, typer.Option(min=1, help="Size of the fake process group.")] = 1024,
    stages: Annotated[str, typer.Option(help="Comma-separated ZeRO stages.")] = "1,2,3",
    curve_model: Annotated[str, typer.Option(help="Shape of the model of the costs over N.")] = "239m",
    curve_stage: Annotated[int, typer.Option(min=1, max=3, help="ZeRO stage of the costs over N.")] = 3,
    curve_real: Annotated[str, typer.Option(help="Numbers of real processes.")] = "2,4,8",
    curve_ranks: Annotated[
        str, typer.Option(help="Numbers of simulated ranks, none or at least two.")
    ] = "64,256,1024,4096,16384",
) -> None:
    """Set up one rank of many, hold its bytes against the formula, measure its costs over N."""
    console = terminal()
    shape, curve_shape = shape_option(model), shape_option(curve_model)
    results: list[dict[str, Any]] = []
    failures: list[str] = []
    for stage in numbers(stages):
        with console.status(f"stage {stage}, {ranks} simulated ranks"):
            try:
                results.append(judge(simulate_rank(shape, stage, ranks)))
            except RuntimeError as error:
                failures.append(str(error))
    curve = measure_curve(
        console, curve_shape, curve_stage, numbers(curve_real), numbers(curve_ranks), failures
    )
    grown = growth(curve)
    data = {
        "environment": describe(),
        "results": results,
        "curve": curve,
        "growth": [asdict(each) for each in grown],
        "failures": failures,
    }
    missed = [f"stage {each['stage']}" for each in results if not (each["bytes_met"] and each["setup_met"])]
    missed += [f"{each.cost} grows by {each.spread - 1:.0%}" for each in grown if each.met is False]
    tables = [scale_table(results, ranks), *([cost_table(curve)] if curve else []), growth_table(grown)]
    plot = partial(plot_rank_costs, curve) if grown else None
    conclude(console, "scale", "Scale", tables, data, [*failures, *missed], plot=plot)


if __name__ == "__main__":
    typer.run(main)
