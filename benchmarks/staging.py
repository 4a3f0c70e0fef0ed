"""Staging of one rank, by formula: pools of largest slots, of two sizes, of exact extents. Nothing runs.

Run from the repository root: python -m benchmarks.staging [--models 34m,239m,bloom-560m,7b]
"""

from typing import Annotated, Any

import torch
import typer

from benchmarks.harness.environment import describe
from benchmarks.harness.report import Table, conclude, terminal
from benchmarks.harness.shapes import build_model, shape_named
from zero_ext.plan import model_staging, slot_pool_bytes

TILES = 16
STORAGES: dict[str, dict[str, Any]] = {
    "device": {},
    "optimizer on host": {"grads": "host", "optimizer": "host"},
    "all on NVMe": {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "nvme_paths": ["/nvme"]},
}


def staging_rows(models: list[str], ranks: list[int]) -> list[dict[str, Any]]:
    """Bytes for every model, place, number of ranks, whole and with tiled embedding and head."""
    rows = []
    for name in models:
        with torch.device("meta"):
            model = build_model(shape_named(name))
        optimizer = torch.optim.AdamW(model.parameters())
        tiles = {"Embedding": TILES, "lm_head": TILES}
        for storage, tiers in STORAGES.items():
            for world_size in ranks:
                for cut in ({}, tiles):
                    config = {"stage": 3, "offload": tiers, "units": {"tiles": cut}}
                    staging = model_staging(model, optimizer, config, world_size)
                    rows.append(
                        {
                            "model": name,
                            "tiles": TILES if cut else 0,
                            "storage": storage,
                            "ranks": world_size,
                            "largest_slot": slot_pool_bytes(staging.demands, 1),
                            "two_classes": slot_pool_bytes(staging.demands, 2),
                            "exact": staging.pool.nbytes,
                            "host": staging.host,
                        }
                    )
    return rows


def staging_table(rows: list[dict[str, Any]]) -> Table:
    """The rows in MiB."""
    table = Table(
        "Staging of a rank, stage 3, MiB",
        ("model", "state", "ranks", "largest slots", "two classes", "exact extents", "host"),
        note="Largest slots, two classes, exact extents: the pool on the device (gathered parameters,"
        " gradients under way), for the same demands of one step; the engine allocates exact extents. Host:"
        f" rooms of the optimizer step and ring. Tiled: embedding and head in {TILES} tiles. bfloat16.",
    )
    for row in rows:
        figures = [f"{row[key] / 2**20:,.1f}" for key in ("largest_slot", "two_classes", "exact", "host")]
        name = f"{row['model']}, tiled" if row["tiles"] else row["model"]
        table.rows.append([name, row["storage"], str(row["ranks"]), *figures])
    return table


def main(
    models: Annotated[str, typer.Option(help="Comma-separated shapes.")] = "34m,239m,bloom-560m,7b",
    ranks: Annotated[str, typer.Option(help="Comma-separated numbers of ranks.")] = "1,2",
) -> None:
    """Plan the staging of models; write the result."""
    console = terminal()
    rows = staging_rows(models.split(","), [int(number) for number in ranks.split(",")])
    data = {"environment": describe(), "rows": rows}
    conclude(console, "staging", "Staging", [staging_table(rows)], data)


if __name__ == "__main__":
    typer.run(main)
