"""The benchmark of quality: runs in several sittings, verdicts, and the windows that all modes share."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from benchmarks import convergence
from benchmarks.harness import convergence_run
from benchmarks.harness.compressed_modes import mode_named
from benchmarks.harness.convergence_run import LAST_STEPS, Record, evaluation_steps
from benchmarks.harness.convergence_verdict import judge
from benchmarks.harness.text_model import BYTE_LLAMA, text_run
from tests.benchmarks.conftest import Concluded

ENDS = {"adam": 2.0, "zero3": 2.0, "onebit_adam": 2.01, "zeropp": 2.025}


class PretendedTeam:
    """Ranks whose checkpoints are files, whose loss is the mode's own at every step, higher by the seed's
    hundredth."""

    trained: ClassVar[list[tuple[str, int, int]]] = []

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> PretendedTeam:
        return self

    def __exit__(self, *error: object) -> None: ...

    def ask(self, command: str, **arguments: Any) -> list[Any]:
        if command == "start":
            self.mode, self.seed = arguments["mode"], arguments["seed"]
            self.stored = Path(arguments["folder"]) / "step-1"
            found = json.loads(self.stored.read_text()) if self.stored.exists() else None
            self.done = found["done"] if found else 0
            return [found] * 4
        if command == "train":
            self.trained.append((self.mode, self.done, arguments["until"]))
            steps, self.done = arguments["until"] - self.done, arguments["until"]
            answer = {"losses": [3.0] * steps, "sent": {"gather": 10 * steps}, "seconds": 1.0}
            return [answer | {"crossing": {"gather": steps}}] * 4
        if command == "held_out":
            return [ENDS[self.mode] * (1 + self.seed / 100)] * 4
        self.stored.write_text(json.dumps(arguments["record"]))
        return [None] * 4


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, int, int]]:
    monkeypatch.setattr(convergence_run, "Team", PretendedTeam)
    monkeypatch.setattr(PretendedTeam, "trained", [])
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "held_out.txt").write_text("text")
    return PretendedTeam.trained


def test_a_run_goes_on_where_the_last_sitting_stopped(
    pretended: list[tuple[str, int, int]], concluded: Concluded, tmp_path: Path
) -> None:
    options = {"modes": "adam,onebit_adam", "seeds": 1, "steps": 60, "folder": tmp_path / "runs"}

    def clock() -> float:
        return 0.0 if len(pretended) < 2 else 1e9

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convergence.time, "monotonic", clock)
        data, _ = concluded(convergence.main, minutes=1.0, **options)
    assert data["unfinished"] == [["adam", "0", "4"], ["onebit_adam", "0", "0"]]
    data, status = concluded(convergence.main, minutes=1.0, **options)
    assert status == 0 and data["unfinished"] == []
    for mode in ("adam", "onebit_adam"):
        sittings = [(begin, end) for name, begin, end in pretended if name == mode]
        assert [end for _, end in sittings] == evaluation_steps(60) and sittings[0][0] == 0
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(sittings))
    (adam, one_bit) = data["runs"]
    assert len(adam["losses"]) == 60 and adam["sent"] == {"gather": 4 * 10 * 60}
    assert one_bit["crossing"] == {"gather": 4 * 60}
    assert not list((tmp_path / "runs").rglob("step-*"))
    assert (tmp_path / "results" / "convergence" / "8m-bytes.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="is of 60 steps in bf16, wanted are 61"):
        convergence.main(**{**options, "steps": 61}, minutes=1.0)


def test_verdicts_by_tolerance_and_spread() -> None:
    def finished(mode: str, ends: list[float]) -> list[Record]:
        curve = [(2900, 9.0), (2910, 1.0), (3000, 1.0)]
        return [
            Record("8m-bytes", mode, seed, "bf16", 3000, 3000, [(step, loss * end) for step, loss in curve])
            for seed, end in enumerate(ends)
        ]

    records = [*finished("adam", [2.0, 2.01]), *finished("zero3", [2.0, 2.01])]
    records += [*finished("onebit_adam", [2.02, 2.026]), *finished("zero_one_adam", [2.02, 2.04])]
    records += [*finished("zeropp", [2.03, 2.04]), *finished("lamb", [2.0, 2.2])]
    records += [*finished("onebit_lamb", [2.05, 2.3]), Record("8m-bytes", "zeropp", 2, "bf16", 3000, 10)]
    verdicts = {verdict.mode: verdict for verdict in judge(records)}
    assert verdicts["adam"].held_out == pytest.approx(2.005) and verdicts["adam"].met is None
    assert verdicts["onebit_adam"].met and verdicts["onebit_adam"].bar == pytest.approx(1.01)
    assert verdicts["zero_one_adam"].met is False
    assert verdicts["zeropp"].met and verdicts["zeropp"].ratio == pytest.approx(2.035 / 2.005)
    # Seeds 9.5% apart allow for more than 1%.
    assert verdicts["onebit_lamb"].met and verdicts["onebit_lamb"].ratio == pytest.approx(2.175 / 2.1)
    assert {each.mode: each.met for each in judge(finished("onebit_adam", [2.0, 2.0]))} == {
        "onebit_adam": None
    }


def test_learning_rates_compete_with_the_best_of_the_others() -> None:
    def ended(mode: str, loss: float) -> Record:
        return Record("8m-bytes", mode, 0, "bf16", 3000, 3000, [(3000, loss)])

    ends = {"adam": 2.0, "adam@2": 1.5, "adam@0.5": 1.8, "muon": 1.6, "muon@4": 1.2}
    found = {each.mode: each for each in judge([ended(*each) for each in ends.items()])}
    assert found["muon"].ratio == pytest.approx(1.6 / 1.5) and found["muon"].met is None
    assert found["muon@4"].ratio == pytest.approx(1.2 / 1.5) and found["muon@4"].met
    assert found["adam@2"].ratio is None
    assert mode_named("muon@4").rate_factor == 4 and mode_named("muon@4").config == mode_named("muon").config
    for name in ("muon@", "muon@x", "none@2"):
        with pytest.raises(ValueError, match="unknown mode"):
            mode_named(name)


def test_a_missed_bar_ends_the_program(
    pretended: list[tuple[str, int, int]],
    concluded: Concluded,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ENDS, "zeropp", 2.07)
    data, status = concluded(
        convergence.main, "8m-bytes", 1.0, "adam,zeropp", 2, 20, folder=tmp_path / "runs"
    )
    assert status == 1 and [one["met"] for one in data["verdicts"]] == [None, False]


def test_the_end_is_judged_closely() -> None:
    at = evaluation_steps(3000)
    assert at[-10:] == list(range(2910, 3001, 10)) and 30 < len(at) < 45
    assert at[:3] == [100, 200, 300] and LAST_STEPS == 100
    assert evaluation_steps(4)[-1] == 4 and evaluation_steps(1) == [1]


def test_ranks_draw_other_windows_and_modes_the_same() -> None:
    run, text = text_run("8m-bytes"), torch.randint(256, (5000,), dtype=torch.uint8)
    drawn = [run.windows(text, 1, 7, rank, 4) for rank in range(4)]
    assert drawn[0].shape == (run.batch, run.window) and drawn[0].dtype == torch.int64
    assert len({tuple(answer.flatten().tolist()) for answer in drawn}) == 4
    assert torch.equal(drawn[2], run.windows(text, 1, 7, 2, 4))
    assert not torch.equal(drawn[2], run.windows(text, 1, 8, 2, 4))
    judged = torch.cat([run.held_out(text, rank, 4) for rank in range(4)])
    assert judged.shape == (run.held_out_windows, run.window)
    assert 7.9e6 < BYTE_LLAMA.parameters < 8.1e6
    assert run.factor(0) < run.factor(99) and run.factor(3000) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="known: 8m-bytes, 34m, tiny"):
        text_run("huge")
