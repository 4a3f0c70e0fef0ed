"""Which cases of a family a commit runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.multi.turns import ONE_RANK, runs

ROOT = Path(__file__).parents[2]
FAMILY = "tests/plan/test_muon_against_engine.py"
TEST = "test_a_real_run_holds_sends_and_computes_what_was_planned"


@pytest.mark.parametrize("sizes", [(1, 2), (2, 3), (1, 2, 3), (1, 2, 3, 4), (2,)])
def test_every_size_has_its_turn_and_a_commit_runs_every_case(sizes: tuple[int, ...]) -> None:
    several = [each for each in sizes if each > 1]
    for case in range(7):
        turns = [
            {size for size in sizes if runs(case, size, sizes, number)}
            for number in range(len(several) * ONE_RANK)
        ]
        assert set.union(*turns) == set(sizes)
        assert all(len(found - {1}) == 1 for found in turns)
        assert sum(1 in found for found in turns) == (len(several) if 1 in sizes else 0)


@pytest.mark.parametrize("named", [False, True])
def test_only_tests_that_are_named_all_run(named: bool) -> None:
    """Without names each of the 15 placements runs on two or three ranks, and a third of them alone too."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", FAMILY + f"::{TEST}" * named]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert found.count(f"::{TEST}[") == (3 * 15 if named else 15 + 5), found
