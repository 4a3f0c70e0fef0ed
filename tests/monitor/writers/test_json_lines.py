"""The JSON-lines log as other programs read it."""

from __future__ import annotations

import json
import time
from pathlib import Path

from zero_ext.monitor import JsonLines


def test_every_row_is_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    before = time.time()
    log = JsonLines(path)
    log.write({"step": 1, "loss": float("nan"), "lr": (1e-3, float("inf")), "grad_norm": None})
    log.write({"step": 2, "loss": -float("inf"), "lr": (0.1 + 0.2,)})
    found = [json.loads(line, parse_constant=lambda name: 1 / 0) for line in path.read_text().splitlines()]
    log.close()
    assert all(before - 1 <= row.pop("time") <= time.time() + 1 for row in found)
    assert found == [
        {"step": 1, "loss": "NaN", "lr": [1e-3, "Infinity"], "grad_norm": None},
        {"step": 2, "loss": "-Infinity", "lr": [0.1 + 0.2]},
    ]
