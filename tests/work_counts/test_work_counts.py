"""Counts of the work on hot paths against the committed baseline, and what counts and the comparison say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.work_counts import baseline
from scripts.work_counts.__main__ import main
from scripts.work_counts.baseline import Difference
from scripts.work_counts.counting import (
    BYTES,
    COLLECTIVES,
    OPCODES,
    OPERATIONS,
    UNITS,
    opcodes_of,
    operations_of,
)
from scripts.work_counts.hot_paths import PATHS
from scripts.work_counts.measure import measured_counts
from zero_ext.comm.traffic_stats import CollectiveTraffic, TrafficStats


def test_hot_paths_do_the_work_of_the_baseline() -> None:
    counts = measured_counts()
    exceeding, report = baseline.judge(counts)
    assert not exceeding, f"\n{report}"


def test_the_baseline_has_all_paths_sorted_and_all_units() -> None:
    of_baseline, counts = baseline.read()
    rows = [name for path in PATHS for name in path.rows]
    assert list(counts) == sorted(rows) and len(rows) >= 10
    assert all(tuple(each) == UNITS and min(each.values()) > 0 for each in counts.values())
    assert set(of_baseline) == set(baseline.UNIT_DEPENDS_ON.values())


BEFORE = {"step": {OPCODES: 1000, OPERATIONS: 100}}


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ({"step": {OPCODES: 1030, OPERATIONS: 97}}, []),
        ({"step": {OPCODES: 1031, OPERATIONS: 100}}, ["step  opcodes     1,000  1,031   +3.1%"]),
        ({"step": {OPCODES: 969, OPERATIONS: 100}}, ["step  opcodes     1,000  969   -3.1%"]),
        (
            {"step": {OPCODES: 1, OPERATIONS: 104}},
            [
                "step  opcodes              1,000    1  -99.9%",
                "step  torch operations       100  104   +4.0%",
            ],
        ),
        ({**BEFORE, "save": {OPCODES: 5}}, ["save  opcodes      none    5     new"]),
        (
            {},
            [
                "step  opcodes              1,000  none    gone",
                "step  torch operations       100  none    gone",
            ],
        ),
    ],
)
def test_a_count_beyond_the_tolerance_is_a_row_of_the_report(
    now: dict[str, dict[str, int]], expected: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "baseline.json"
    baseline.write(BEFORE, file)
    exceeding, report = baseline.judge(now, file)
    assert len(exceeding) == len(expected)
    for row in expected:
        assert row.split() in [line.split() for line in report.splitlines()], report
    assert (baseline.WRITE in report) == bool(expected)


def test_a_baseline_of_zero_is_exceeded_by_one() -> None:
    assert Difference("step", COLLECTIVES, 0, 1).exceeds
    assert not Difference("step", COLLECTIVES, 0, 0).exceeds


@pytest.mark.parametrize(
    ("name", "left_out"), [("python", OPCODES), ("torch", OPERATIONS), ("cpu", None), (None, None)]
)
def test_units_that_depend_on_a_version_are_compared_under_that_version(
    name: str | None, left_out: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "baseline.json"
    counts = {"step": dict.fromkeys(UNITS, 100)}
    baseline.write(counts, file)
    content = json.loads(file.read_text())
    if name is not None:
        content["versions"][name] = "0.1"
    file.write_text(json.dumps(content))
    exceeding, report = baseline.judge({"step": dict.fromkeys(UNITS, 200)}, file)
    assert [row.unit for row in exceeding] == [unit for unit in UNITS if unit != left_out]
    assert ("Not compared" in report) == (left_out is not None)


@pytest.mark.parametrize(("now", "status"), [(103, 0), (104, 1)])
def test_the_command_compares_and_writes(
    now: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import typer

    counts = {"step": dict.fromkeys(UNITS, 100)}
    file = tmp_path / "baseline.json"
    monkeypatch.setattr(baseline.judge, "__defaults__", (file,))
    monkeypatch.setattr(baseline.write, "__defaults__", (file,))
    monkeypatch.setattr("scripts.work_counts.__main__.measured_counts", lambda: counts)
    main(write=True)
    assert baseline.read(file) == (baseline.versions(), counts)
    counts = {"step": dict.fromkeys(UNITS, now)}
    ended: Any = 0
    try:
        main(write=False)
    except typer.Exit as exit_:
        ended = exit_.exit_code
    assert ended == status and ("by more than 3%" in capsys.readouterr().out) == bool(status)


def test_opcodes_are_those_of_the_package() -> None:
    stats = TrafficStats()

    def outside() -> int:
        return sum(number * number for number in range(1000))

    def inside() -> None:
        outside()
        stats.begin_step()

    once = opcodes_of(inside)[OPCODES]
    assert opcodes_of(outside) == {OPCODES: 0}
    assert 0 < once < 100
    assert opcodes_of(lambda: [inside() for _ in range(7)]) == {OPCODES: 7 * once}


def operations(sines: int, views: int) -> int:
    """Operations of a forward and a backward with so many sines and transposes."""
    values = torch.ones(2, 2, requires_grad=True)

    def work() -> None:
        result = values
        for _ in range(views):
            result = result.t()
        for _ in range(sines):
            result = result.sin()
        result.sum().backward()

    return operations_of(work)[OPERATIONS]


def test_operations_are_those_of_forward_and_backward_without_views() -> None:
    """A sine is itself in forward, its cosine and a product in backward."""
    assert operations(sines=3, views=0) - operations(sines=2, views=0) == 3
    assert operations(sines=2, views=0) == operations(sines=2, views=4)


def test_collectives_are_counted_with_the_bytes_that_are_sent() -> None:
    stats = TrafficStats()

    def work() -> None:
        stats.record(CollectiveTraffic("gather", elements=8, bytes_sent=32, crossing_bytes=0))
        stats.record(CollectiveTraffic("gather", elements=2, bytes_sent=8, crossing_bytes=8))

    assert operations_of(work) == {OPERATIONS: 0, COLLECTIVES: 2, BYTES: 40}
    work()
    assert stats.bytes_sent["gather"] == 80
