"""The page on monitoring: its configuration, its code and its names are real."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_ext
from zero_ext.config import load_config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how_to" / "monitoring.md"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


class Writer:
    """What the page calls MyWriter."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def write(self, row: Any) -> None:
        self.rows.append(row)

    def close(self) -> None:
        pass


def test_the_page_runs_and_names_every_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = blocks("json")
    settings = json.loads(text)
    assert load_config(settings).monitor is not None
    sections = ("output_dir", "csv", "comms", "flops", "trace")
    settings["monitor"] = {name: settings["monitor"][name] for name in sections}
    model = nn.Linear(3, 1)
    model, optimizer = zero_ext.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), settings)
    logging, attaching = blocks("python")
    before, during = logging.split("...\n")
    names: dict[str, Any] = {"model": model, "optimizer": optimizer, "accuracy": 0.5, "MyWriter": Writer}
    exec(before, names)
    for _ in range(2):
        names["loss"] = model(torch.randn(2, 3)).square().mean()
        exec(during, names)
        optimizer.zero_grad()
    rows = [json.loads(line) for line in Path("runs/first/steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and all(row["accuracy"] == 0.5 for row in rows)
    cells = set(re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.MULTILINE))
    documented = {name for cell in cells for name in re.findall(r"`([\w/]+)`", cell)} | {"time", "accuracy"}
    for name in rows[-1]:
        assert name in documented or name.split("/")[0] in ("traffic", "transfer"), name
    names["monitor"].close()
    first, last = attaching.split("...\n")
    exec(
        first.replace("MyWriter()", "writer"),
        {**names, "writer": names.setdefault("writer", Writer())},
        names,
    )
    model(torch.randn(2, 3)).square().mean().backward()
    optimizer.step()
    exec(last, names)
    assert [row["step"] for row in names["writer"].rows] == [3] and "time/step" in names["writer"].rows[0]


def test_the_plot_exists_and_is_small() -> None:
    (name,) = re.findall(r"!\[.*?\]\((.*?)\)", PAGE.read_text())
    data = (PAGE.parent / name).read_bytes()
    assert data[:4] == b"\x89PNG" and len(data) < 150_000
