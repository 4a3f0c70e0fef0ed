"""The sweep over layouts: which there are, one that trains, and one rank of one layout that strays."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import parallel_equality
from benchmarks.parallel_equality import MODEL, STAGES, Layout, layouts
from examples.demo_3d.steps import Step
from tests.benchmarks.conftest import Concluded


def test_layouts() -> None:
    found = layouts(8)
    assert len(found) == len(set(found)) == 11
    assert [layout.ranks for layout in found] == [1, *[2] * 3, *[4] * 6, 8]
    assert found[-1] == Layout(2, 2, 2) and len(layouts(4)) == 10


def test_one_rank_trains_as_the_plain_loop(concluded: Concluded) -> None:
    data, status = concluded(parallel_equality.main, 3, 1)
    assert status == 0 and [row["stage"] for row in data["results"]] == list(STAGES)
    for row in data["results"]:
        assert len(row["steps"]) == 3 and row["loss_difference"] <= 1e-5 and row["norm_difference"] <= 1e-5
    assert min(norm for _, norm in data["one_process"]) > MODEL.clipping


class Pretended:
    """A team whose last rank strays in two stages × two replicas under ZeRO-3."""

    away = 0.0

    def __init__(self, name: str, ranks: int, *_: Any, **__: Any) -> None:
        self.ranks = ranks

    def __enter__(self) -> Pretended:
        return self

    def __exit__(self, *error: object) -> None: ...

    def ask(self, command: str, **arguments: Any) -> list[Any]:
        if command == "start":
            return []
        alone = [[5.0, 1.0], [4.0, 1.5]]
        strays = arguments["stage"] == 3 and arguments["axes"] == {"pp": 2, "dp": 2, "tp": 1}
        last = [[loss * (1 + self.away * strays), norm] for loss, norm in alone]
        return [*[alone] * (self.ranks - 1), last]


@pytest.mark.parametrize(("away", "status"), [(0.9e-5, 0), (1.1e-5, 1), (float("nan"), 1)])
def test_a_rank_that_strays_fails(
    away: float, status: int, concluded: Concluded, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [Step(5.0, 1.0), Step(4.0, 1.5)]
    monkeypatch.setattr(parallel_equality, "steps_of_one_process", lambda settings: alone)
    monkeypatch.setattr(parallel_equality, "Team", Pretended)
    monkeypatch.setattr(Pretended, "away", away)
    data, ended = concluded(parallel_equality.main, 2, 4)
    assert ended == status and len(data["results"]) == 10 * len(STAGES)
