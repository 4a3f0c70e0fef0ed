"""The benchmark of monitors: its figures, and one run of a tiny model."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.watched import COMMANDS, Watched
from benchmarks.monitor import BAR, POLICIES, Run, measure, table_of


def test_the_bar_is_on_the_ratio_and_the_share_is_of_a_step() -> None:
    run = Run("a", on=[2.02, 2.0, 2.02], off=[2.0, 2.0, 2.0], own=[0.01, 0.03, 0.02], events=7)
    assert run.ratio().median == 1.01 <= BAR and run.met()
    assert run.share() == 0.01
    run.on[1] = 2.1  # the median stays, the interval does not
    assert not run.met()
    (row,) = table_of([run], "tiny", 3, 3, 5).rows
    assert "NO" in row and "1.00%" in row


class InThisProcess:
    """Answers as a team of one would."""

    def __init__(self) -> None:
        self._rank = Watched()

    def ask(self, command: str, **arguments: Any) -> list[Any]:
        assert command in COMMANDS
        return [getattr(self._rank, command)(**arguments)]

    def close(self) -> None:
        self._rank.close()


def test_one_run(tmp_path: Path) -> None:
    team = InThisProcess()
    with contextlib.closing(team):
        team.ask("start", shape="tiny", threads=torch.get_num_threads(), options={"stage": 3}, warm_up=1)
        runs = [Run(name) for name in POLICIES]
        measure(team, runs, 2, 2, str(tmp_path))  # type: ignore[arg-type]
    for run in runs:
        assert len(run.on) == len(run.off) == len(run.own) == 2
        assert min(run.on + run.off + run.own) > 0 and run.events >= 4  # forward, backward, step and its end
    assert len(list(tmp_path.rglob("steps.jsonl"))) == 2
    assert any((tmp_path / "0").rglob("trace-rank0.json"))
