"""Families of cases that are tested in turns: a commit runs a part of them, the next commit another."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

EVERY_TURN = "--every-turn"
ONE_RANK = 3  # one case in so many runs on a rank alone, which shares nothing with others
SHARES = 3  # a commit runs one of so many shares of a family's cases
FEWEST = 4  # cases of a family that is divided into shares
_COMMITS = 6  # after so many, a case has had each of up to four numbers of ranks


def commit_number() -> int:
    """Return a number that changes with the commit; 0 where there is no git."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(done.stdout.strip(), 16)


def share_of(case: int) -> int:
    """Return the share of a case.

    It is the sum of the digits of its position in base ``SHARES``. Cases come from products of lists: by the
    last digit alone a share would miss two of three values of a list of three.
    """
    total = 0
    while case:
        case, digit = divmod(case, SHARES)
        total += digit
    return total % SHARES


def runs(case: int, cases: int, size: int, sizes: Sequence[int], number: int) -> bool:
    """Whether a commit runs a case of a family on ``size`` of ``sizes`` ranks.

    Args:
        case: its position in the family.
        cases: how many the family has.
        size: a number of ranks; 0 if the test has none.
        sizes: the numbers of ranks of the family; empty if it has none.
        number: that of the commit.
    """
    if cases >= FEWEST and share_of(case) != number // _COMMITS % SHARES:
        return False
    several = [each for each in sizes if each > 1]
    if not several:
        return True
    if size == 1:
        return (case + number) % ONE_RANK == 0
    return several[(case + number) % len(several)] == size


def leave_out_of_turn(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take what has no turn out of ``items``, in families with ``by_turns``.

    Nothing is left out if tests are named, or if every turn is asked for.
    """
    if config.option.keyword or any("::" in argument for argument in config.args):
        return
    if config.getoption(EVERY_TURN, default=False):
        return
    number = commit_number()
    families: dict[str, dict[tuple[int, ...], int]] = {}
    found = []
    for item in items:
        mark = item.get_closest_marker("by_turns")
        if mark is None or not isinstance(item, pytest.Function):
            continue
        values = {**item.callspec.params}
        size = values.pop("world_size") if mark.args else 0
        cases = families.setdefault(item.nodeid.partition("[")[0], {})
        case = cases.setdefault(tuple(map(id, values.values())), len(cases))
        found.append((item, case, cases, size, mark.args))
    # Only now is it known how many cases a family has.
    left_out = {
        item for item, case, cases, size, sizes in found if not runs(case, len(cases), size, sizes, number)
    }
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]
