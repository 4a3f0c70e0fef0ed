"""1,024 simulated ranks: bytes of a rank against the formula, and the time to set up a 7B model.

Run from the repository root: python -m benchmarks.scale [--model 7b] [--ranks 1024] [--stages 1,2,3]
"""

from typing import Annotated, Any

import typer

from benchmarks.harness.environment import describe
from benchmarks.harness.formula import STATE_KINDS, relative_excess, state_bytes
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


def main(
    model: Annotated[str, typer.Option(help="Shape of the model: tiny, 34m, 239m, 7b.")] = "7b",
    ranks: Annotated[int, typer.Option(min=1, help="Size of the fake process group.")] = 1024,
    stages: Annotated[str, typer.Option(help="Comma-separated ZeRO stages.")] = "1,2,3",
) -> None:
    """Set up one rank of many, hold its bytes against the formula, write the result."""
    console = terminal()
    try:
        shape = shape_named(model)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    results, failures = [], []
    for stage in (int(word) for word in stages.split(",")):
        with console.status(f"stage {stage}, {ranks} simulated ranks"):
            try:
                results.append(judge(simulate_rank(shape.name, stage, ranks)))
            except RuntimeError as error:
                failures.append(str(error))
    data = {"environment": describe(), "results": results, "failures": failures}
    missed = [f"stage {each['stage']}" for each in results if not (each["bytes_met"] and each["setup_met"])]
    conclude(console, "scale", "Scale", [scale_table(results, ranks)], data, [*failures, *missed])


if __name__ == "__main__":
    typer.run(main)
