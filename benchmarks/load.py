"""Peak memory and time of loading safetensors into shards of stage 3, beside transformers' own loading.

The files of a mixture have each expert's matrices one by one, and the model has them stacked.
Run from the repository root: python -m benchmarks.load [--models bloom-560m,mixtral-119m] [--ranks 2]
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness.environment import describe
from benchmarks.harness.loader import folder_bytes
from benchmarks.harness.ranks import Team
from benchmarks.harness.report import Table, conclude, megabytes, terminal

WORKER = "benchmarks.harness.loader"


def measure(model: str, dtype: str, ranks: int, folder: Path) -> dict[str, Any]:
    """Both ways of loading, in turn, in the same processes; figures of every rank."""
    with Team("writer", 1, 2, worker=WORKER) as writer:
        writer.ask("save", shape=model, dtype=dtype, folder=str(folder / "model"))
        tiny = f"{model.partition('-')[0]}-tiny"
        writer.ask("save", shape=tiny, dtype=dtype, folder=str(folder / "tiny"))
    with Team("loaders", ranks, 1, worker=WORKER) as loaders:
        base = loaders.ask("base", folder=str(folder / "tiny"))
        shards = loaders.ask("load_shards", folder=str(folder / "model"))
        full = loaders.ask("load_full", folder=str(folder / "model"))
    return {"files": folder_bytes(folder / "model"), "base": base, "shards": shards, "full": full}


def bar_of(found: dict[str, Any], ranks: int) -> tuple[int, bool]:
    """One shard and the largest tensor or one layer's experts in bytes, and whether no rank used more."""
    one = found["shards"][0]
    bar = -(-one["parameters"] // ranks) + max(one["largest"], one["experts"])
    return bar, max(each["peak"] for each in found["shards"]) <= bar


def table_of(found: dict[str, Any], model: str, dtype: str, ranks: int) -> Table:
    """Worst rank of each figure, and the bar."""
    worst = {name: max(found["shards"], key=itemgetter(name)) for name in ("peak", "prepared", "seconds")}
    bar, met = bar_of(found, ranks)
    above = "a layer's experts" if found["shards"][0]["experts"] else "the largest tensor"
    peak, full = worst["peak"]["peak"], max(each["peak"] for each in found["full"])
    rows: list[Sequence[str]] = [
        (f"one shard and {above} (the bar)", megabytes(bar), ""),
        ("zero_ext, shards loaded", megabytes(peak), f"{worst['seconds']['seconds']:.1f}"),
        ("zero_ext, and prepared: gather buffers too", megabytes(worst["prepared"]["prepared"]), ""),
        (
            "transformers, the whole model",
            megabytes(full),
            f"{max(each['seconds'] for each in found['full']):.1f}",
        ),
    ]
    note = (
        f"Most memory of a rank over the {megabytes(max(found['base']))} MB that Python, torch, transformers "
        f"and loading a tiny model before leave resident. Bar {'met' if met else 'MISSED'}."
    )
    title = f"{model}, {dtype}, {megabytes(found['files'])} MB of safetensors, {ranks} ranks"
    return Table(title, ("what", "MB a rank", "seconds"), rows, note=note)


def main(
    models: Annotated[str, typer.Option(help="Comma-separated shapes.")] = "bloom-560m,mixtral-119m",
    dtypes: Annotated[str, typer.Option(help="Of the files, comma-separated.")] = "bfloat16,float32",
    ranks: Annotated[int, typer.Option(min=1, help="Processes that load.")] = 2,
) -> None:
    """Load, print the peaks, write the results."""
    console = terminal()
    tables, missed, data = [], [], {"environment": describe()}
    for model, dtype in product(models.split(","), dtypes.split(",")):
        with tempfile.TemporaryDirectory(prefix="zero_ext_bench_") as folder:
            found = measure(model, dtype, ranks, Path(folder))
        tables.append(table_of(found, model, dtype, ranks))
        data[f"{model}, {dtype}"] = found
        if not bar_of(found, ranks)[1]:
            missed.append(f"{model}, {dtype}: the bar is missed")
    conclude(console, "load", "Loading a model into shards", tables, data, missed)


if __name__ == "__main__":
    typer.run(main)
