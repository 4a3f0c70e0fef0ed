"""What the processes of the demonstration tell each other: one JSON file a run and rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_record(folder: Path, run: str, rank: int, record: dict[str, Any]) -> None:
    """Leaves `record` of `run` on `rank` in `folder`."""
    (folder / f"{run}-rank{rank}.json").write_text(json.dumps(record, indent=1))


def read_records(folder: Path, run: str) -> list[dict[str, Any]]:
    """The records of all ranks of `run`, in rank order."""
    paths = sorted(folder.glob(f"{run}-rank*.json"))
    if not paths:
        raise FileNotFoundError(f"{folder}: the run {run!r} left no record")
    return [json.loads(path.read_text()) for path in paths]


def mean_losses(records: list[dict[str, Any]]) -> list[float]:
    """The global loss of each step: the mean over ranks, whose batches are equally large."""
    return [
        sum(losses) / len(losses) for losses in zip(*(record["losses"] for record in records), strict=True)
    ]
