"""Files that grow by whole lines, as other programs read them."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zero_ext.config.events import GatherEvent, StepEnd
from zero_ext.monitor import CsvFile, JsonLines
from zero_ext.monitor.file_writers import LineFile
from zero_ext.monitor.sources import facts_of


@pytest.mark.parametrize("rest", ["", '{"half', "x" * 200_000])
def test_what_a_crash_left_of_a_line_is_cut_off(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "deep" / "log"
    first = LineFile(path)
    assert first.first_line() == ""
    first.write("one, ö")
    first.close()
    first.close()
    with path.open("a") as file:
        file.write(rest)
    again = LineFile(path)
    assert again.first_line() == "one, ö"
    again.write("two")
    assert path.read_text() == "one, ö\ntwo\n"
    again.close()
    with pytest.raises(ValueError, match="log: the file is closed"):
        again.write("three")


def test_a_kill_leaves_at_most_one_incomplete_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    code = (
        "import sys\n"
        "from zero_ext.monitor.file_writers import LineFile\n"
        "file = LineFile(sys.argv[1])\n"
        "number = 0\n"
        "while True:\n"
        "    file.write(f'{number} ' + 'x' * 3000)\n"
        "    if number == 200: print('ready', flush=True)\n"
        "    number += 1\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    *lines, rest = path.read_text().split("\n")
    assert len(lines) > 200
    expected = [f"{number} " + "x" * 3000 for number in range(len(lines) + 1)]
    assert lines == expected[:-1]
    assert expected[-1].startswith(rest)
    LineFile(path).close()
    assert path.read_text().split("\n") == [*lines, ""]


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
