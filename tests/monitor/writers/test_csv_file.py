"""The CSV file as other programs read it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from zero_ext.config.events import GatherEvent, StepEnd
from zero_ext.monitor import CsvFile
from zero_ext.monitor.metric_row import facts_of


def step(number: int, loss: float | None = 2.5) -> StepEnd:
    return StepEnd(number, loss, 0.1 + 0.2, (1e-3, 5e-4), number == 2, 65536.0, 0.25)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_are_complete_while_the_file_is_open_and_survive_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "log.csv"
    rows = CsvFile(path)
    rows(step(1))
    rows(GatherEvent("layers.0", 5, False, 0.1))
    rows(step(2, loss=None))
    assert [row["step"] for row in read(path)] == ["1", "2"]
    rows.close()
    with CsvFile(path) as rows:
        rows(step(3))
    first, second, third = read(path)
    assert float(first["grad_norm"]) == 0.1 + 0.2
    assert [float(value) for value in first["lr"].split()] == [1e-3, 5e-4]
    assert (first["loss"], second["loss"], second["skipped"], third["skipped"]) == ("2.5", "", "1", "0")
    assert float(third["loss_scale"]) == 65536 and float(third["seconds"]) == 0.25


def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"notes.csv: expected .* columns step,loss.*, got 'a,b'"):
        CsvFile(path)
    assert path.read_text() == "a,b\n1,2\n"


def test_events_after_close_are_errors(tmp_path: Path) -> None:
    rows = CsvFile(tmp_path / "log.csv")
    rows.close()
    with pytest.raises(ValueError, match="closed"):
        rows(step(1))


def test_columns_that_come_later_widen_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    with CsvFile(path) as rows:
        rows(step(1))
        rows.write({**facts_of(step(2)), "wait/gather": 0.5, "a, b": 7})
        rows.write({**facts_of(step(3)), "wait/gather": None})
    with CsvFile(path) as rows:
        rows.write({**facts_of(step(4)), "new": 1})
    found = read(path)
    assert [row["step"] for row in found] == ["1", "2", "3", "4"]
    assert [row["wait/gather"] for row in found] == ["", "0.5", "", ""]
    assert [row["a, b"] for row in found] == ["", "7", "", ""]
    assert [row["new"] for row in found] == ["", "", "", "1"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.csv"]
