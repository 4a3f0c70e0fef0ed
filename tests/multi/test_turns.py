"""Which cases of a family a commit runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.multi.turns import EVERY_TURN, FEWEST, ONE_RANK, SHARES, runs, share_of

ROOT = Path(__file__).parents[2]
FAMILY = "tests/plan/test_muon_against_engine.py"
TEST = "test_a_real_run_holds_sends_and_computes_what_was_planned"


@pytest.mark.parametrize("sizes", [(1, 2), (2, 3), (1, 2, 3), (1, 2, 3, 4), (2,)])
def test_every_size_has_its_turn_and_a_commit_runs_every_case_of_few(sizes: tuple[int, ...]) -> None:
    several = [each for each in sizes if each > 1]
    for case in range(FEWEST - 1):
        turns = [
            {size for size in sizes if runs(case, FEWEST - 1, size, sizes, number)}
            for number in range(len(several) * ONE_RANK)
        ]
        assert set.union(*turns) == set(sizes)
        assert all(len(found - {1}) == 1 for found in turns)
        assert sum(1 in found for found in turns) == (len(several) if 1 in sizes else 0)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 3), (1, 2, 3), (1, 2, 3, 4), (2,), (1,), ()])
@pytest.mark.parametrize("cases", [FEWEST, 9, 46])
def test_every_case_on_every_size_has_its_turn_and_a_commit_runs_a_share(
    cases: int, sizes: tuple[int, ...]
) -> None:
    every = {(case, size) for case in range(cases) for size in sizes or (0,)}
    turns = [
        {(case, size) for case, size in every if runs(case, cases, size, sizes, number)}
        for number in range(100)
    ]
    assert set.union(*turns) == every
    for found in turns:
        assert 1 <= len({case for case, _ in found}) <= cases / SHARES + 1


@pytest.mark.parametrize("length", range(2, 13))
def test_a_share_has_every_value_of_a_list_that_is_multiplied_by_others(length: int) -> None:
    for share in range(SHARES):
        assert {case % length for case in range(18 * length) if share_of(case) == share} == {*range(length)}


@pytest.mark.parametrize(
    ("arguments", "all_run"),
    [([FAMILY], False), ([FAMILY, EVERY_TURN], True), ([f"{FAMILY}::{TEST}"], True)],
)
def test_tests_that_are_named_and_every_turn_run_all_cases(arguments: list[str], all_run: bool) -> None:
    """Else five of the 15 placements run, each on two or three ranks, and some of them alone too."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    count = found.count(f"::{TEST}[")
    assert count == 3 * 15 if all_run else 5 <= count <= 10, found
