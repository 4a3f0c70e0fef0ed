"""Families of cases on several numbers of ranks: a commit runs each on one of them, the next on another."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ONE_RANK = 3  # one case in so many runs on a rank alone, which shares nothing with others


def commit_number() -> int:
    """Return a number that changes with the commit; 0 where there is no git."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(done.stdout.strip(), 16)


def runs(case: int, size: int, sizes: Sequence[int], number: int) -> bool:
    """Whether a commit runs a case of a family on ``size`` of ``sizes`` ranks.

    Args:
        case: its position in the family.
        size: a number of ranks.
        sizes: the numbers of ranks of the family.
        number: that of the commit.
    """
    if size == 1:
        return (case + number) % ONE_RANK == 0
    several = [each for each in sizes if each > 1]
    return several[(case + number) % len(several)] == size


def leave_out_of_turn(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take what has no turn out of ``items``, in families with ``by_turns``; nothing if tests are named."""
    if config.option.keyword or any("::" in argument for argument in config.args):
        return
    number = commit_number()
    families: dict[str, dict[tuple[int, ...], int]] = {}

    def has_turn(item: pytest.Item) -> bool:
        mark = item.get_closest_marker("by_turns")
        if mark is None or not isinstance(item, pytest.Function):
            return True
        cases = families.setdefault(item.nodeid.partition("[")[0], {})
        values = {**item.callspec.params}
        size = values.pop("world_size")
        case = cases.setdefault(tuple(map(id, values.values())), len(cases))
        return runs(case, size, mark.args, number)

    turns = [(item, has_turn(item)) for item in items]
    config.hook.pytest_deselected(items=[item for item, turn in turns if not turn])
    items[:] = [item for item, turn in turns if turn]
