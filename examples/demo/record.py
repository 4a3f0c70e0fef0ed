"""Read and write the results of training processes, one JSON file per run and rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_record(folder: Path, run: str, rank: int, record: dict[str, Any]) -> None:
    """Save the record of `run` on `rank` in `folder`."""
    (folder / f"{run}-rank{rank}.json").write_text(json.dumps(record, indent=1))


def read_records(folder: Path, run: str) -> list[dict[str, Any]]:
    """Load the records of all ranks of `run`, in rank order."""
    paths = sorted(folder.glob(f"{run}-rank*.json"))
    if not paths:
        raise FileNotFoundError(f"{folder}: expected a record of the run {run!r}, got none.")
    return [json.loads(path.read_text()) for path in paths]


def mean_losses(records: list[dict[str, Any]]) -> list[float]:
    """Return the global loss of each step, the mean over ranks with batches of equal size."""
    return [
        sum(losses) / len(losses) for losses in zip(*(record["losses"] for record in records), strict=True)
    ]
