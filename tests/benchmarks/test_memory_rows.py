"""Rows of the memory benchmark: steady bytes against peers, live tensors against the planner's formulas."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import memory
from benchmarks.harness import account
from benchmarks.harness.account import Account, account_of, planned_bytes
from benchmarks.harness.formula import STATE_KINDS
from benchmarks.harness.matches import MEMORY_MATCHES, contenders_of
from benchmarks.harness.shapes import SHAPES
from tests.benchmarks.conftest import Concluded

TINY = SHAPES["tiny"]


def reading(steady: int, peak: int) -> dict[str, int]:
    return {**dict.fromkeys(memory.READINGS, peak), "steady": steady}


@pytest.mark.parametrize(("steady", "missed"), [(100, []), (99, []), (101, ["stage1", "stage2"])])
def test_steady_bytes_of_stages_1_and_2_have_a_bar_against_deepspeed(steady: int, missed: list[str]) -> None:
    readings = {"34m": {key: reading(100, 200) for key in contenders_of(list(MEMORY_MATCHES))}}
    for stage in range(4):
        readings["34m"][f"stage{stage}"] = reading(steady, 150)
    rows = memory.peak_rows(list(MEMORY_MATCHES), readings)
    bars = {(row["subject"], row["peer"]): row["steady_bar"] for row in rows if row["steady_bar"] is not None}
    assert bars == {("stage2", "deepspeed2"): 1.0, ("stage1", "deepspeed1"): 1.0}
    assert all(row["met"] for row in rows)
    assert sorted(memory.missed_memory(rows)) == [
        f"34m, {stage} / deepspeed{stage[-1]}: steady 1.010, at most 1 expected" for stage in missed
    ]
    cells = {
        line[0].split()[2]: line[-3:] for line in memory.peak_table(rows).rows if "DeepSpeed 2" in line[0]
    }
    assert cells == {"2": [f"{steady / 100:.3f}", "≤ 1.00", "no" if missed else "yes"]}


@pytest.mark.parametrize(("stage", "ranks"), [(0, 4), (1, 4), (2, 4), (3, 4), (2, 1)])
def test_planned_bytes_are_those_of_the_paper(stage: int, ranks: int) -> None:
    """16 bytes per parameter, of which 12 are sharded from stage 1 on, 14 from stage 2, all from stage 3."""
    sharded = (0, 12, 14, 16)[stage]
    state, staging = planned_bytes(TINY, stage, ranks)
    assert state == pytest.approx(TINY.parameters * (16 - sharded + sharded / ranks), rel=1e-4)
    assert (staging > 0) == (ranks > 1)


def account_with(stage: int, ranks: int, live: int, planned_state: int, planned_staging: int) -> Account:
    """An account that meets every other bar."""
    breakdown = dict.fromkeys(STATE_KINDS, live // 3)
    formula = {kind: float(count) for kind, count in breakdown.items()}
    return Account("34m", stage, ranks, breakdown, formula, live, live, planned_state, planned_staging)


@pytest.mark.parametrize(
    ("live", "met"), [(850, True), (1000, True), (1150, True), (1151, False), (849, False)]
)
def test_live_tensors_are_within_5_percent_and_the_staging(live: int, met: bool) -> None:
    assert account_with(2, 4, live, 1000, 100).planned == met
    assert account_with(2, 4, live, 1000, 100).bars()["planner"] == met
    for stage, ranks in ((2, 2), (3, 4)):
        assert "planner" not in account_with(stage, ranks, live, 1000, 100).bars()


def test_live_tensors_of_two_ranks_are_as_planned() -> None:
    found = account_of(TINY, 2, 2, 2)
    assert (found.planned_state, found.planned_staging) == planned_bytes(TINY, 2, 2)
    assert found.planned and found.live_tensors > found.planned_state


@pytest.mark.parametrize(
    ("planned_state", "steady", "missed"),
    [
        (3 * 10**6, 100, []),
        (3 * 10**5, 100, ["state of a rank: planner"]),
        (3 * 10**6, 101, ["tiny, stage2 / deepspeed2: steady 1.010, at most 1 expected"]),
    ],
)
def test_the_program_has_both_rows(
    planned_state: int, steady: int, missed: list[str], concluded: Concluded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resident(key: str, *_: Any) -> dict[str, int]:
        return reading(100, 200) if key == "deepspeed2" else reading(steady, 150)

    def account_of_all(shape: Any, stage: int, ranks: int, steps: int) -> Account:
        return account_with(stage, ranks, 3 * 10**6, planned_state, 0)

    monkeypatch.setattr(account, "account_of", account_of_all)
    monkeypatch.setattr(memory, "measure_resident", resident)
    monkeypatch.setattr(memory, "compile_for", lambda keys, console: None)
    monkeypatch.setattr(memory, "plot_state_bytes", lambda accounts, path: path)
    data, status = concluded(memory.main, "tiny", 2, "stage2,deepspeed2", "tiny")
    assert data["missed"] == missed and status == int(bool(missed))
    assert len(data["account"]) == 12
