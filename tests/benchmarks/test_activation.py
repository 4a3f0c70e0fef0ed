"""The benchmark of checkpoints: its bars, and one run of a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from benchmarks import activation
from benchmarks.activation import BARS, MODES, Run, measure, table_of
from benchmarks.harness.checkpointed import COMMANDS, TORCH, Checkpointed


def test_bars_are_on_the_ratio_to_torch_and_on_the_gradients() -> None:
    base = Run(TORCH, [2.0, 2.0, 2.0], True, {"saved": 0, "layers": 2})
    host = Run("host", [2.0 * BARS["host"]] * 3, True, {"saved": 4_000_000, "layers": 2})
    assert host.met(base) and base.met(base)
    assert "2.00" in table_of([base, host], "tiny", 64, 3, 1).rows[1]
    host.seconds = [2.2] * 3
    assert not host.met(base)
    host.seconds, host.same_bits = [2.0] * 3, False
    assert not host.met(base)


class InThisProcess:
    """Answers as a team of one would."""

    def __init__(self) -> None:
        self._rank = Checkpointed()

    def ask(self, command: str, **arguments: Any) -> list[Any]:
        assert command in COMMANDS
        return [getattr(self._rank, command)(**arguments)]


def test_a_run_of_a_tiny_model() -> None:
    team, runs, threads = InThisProcess(), [Run(name) for name in MODES], torch.get_num_threads()
    team.ask("start", shape="tiny", threads=1, tokens=32, modes=MODES)
    measure(team, runs, rounds=1, repeats=1)  # type: ignore[arg-type]
    torch.set_num_threads(threads)
    saved = {run.name: run.facts["saved"] for run in runs}
    assert all(run.same_bits and run.seconds[0] > 0 for run in runs)
    assert saved[TORCH] == saved["device"] == 0
    layers, nbytes = runs[0].facts["layers"], -(-runs[0].facts["input"] // 4096) * 4096
    assert {saved[name] for name in ("one buffer", "host", "NVMe")} == {layers * nbytes}
    team._rank.close()


class Flipped(torch.autograd.Function):
    """Turns the sign of all gradients before it: their norm is the same."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class Wrong:
    """A way to checkpoint whose gradients are others."""

    def __call__(self, function: Any, hidden: torch.Tensor, *args: Any) -> Any:
        return function(Flipped.apply(hidden), *args)

    def used_bytes(self) -> int:
        return 0


def test_gradients_of_the_same_norm_are_not_the_same() -> None:
    rank, threads = Checkpointed(), torch.get_num_threads()
    rank.start(shape="tiny", threads=1, tokens=32, modes={TORCH: None, "device": {}})
    assert rank.compare() == {TORCH: True, "device": True}
    rank._modes["device"] = Wrong()  # type: ignore[assignment]
    assert rank.compare() == {TORCH: True, "device": False}
    torch.set_num_threads(threads)
    rank.close()


def test_a_missed_bar_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    class NoTeam:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def __enter__(self) -> NoTeam:
            return self

        def __exit__(self, *error: object) -> None: ...

        def ask(self, command: str, **arguments: Any) -> None: ...

    def measured(team: Any, runs: list[Run], rounds: int, repeats: int) -> None:
        for run in runs:
            run.seconds, run.same_bits = [2.0], run.name != "host"
            run.facts = {"saved": 0, "layers": 2}

    def write(name: str, *rest: Any) -> list[Path]:
        written.append(name)
        return []

    monkeypatch.setattr(activation, "Team", NoTeam)
    monkeypatch.setattr(activation, "measure", measured)
    monkeypatch.setattr("benchmarks.harness.report.write_results", write)
    with pytest.raises(typer.Exit) as ended:
        activation.main("tiny", 64, 1, 1)
    assert ended.value.exit_code == 1 and written == ["activation"]
