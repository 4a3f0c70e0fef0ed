"""Benchmarks as programs: tiny runs, and the exit status that says that a bar is missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    adam,
    aio,
    checkpoint,
    compression,
    inference,
    lamb,
    load,
    long_context,
    monitor,
    muon_nvme,
    overlap,
    plan,
    simulation,
    tune,
)
from benchmarks.harness import checkpoint_peers
from benchmarks.harness.loader import Loader
from benchmarks.harness.statistics import ratio_of_rounds
from benchmarks.peers.storage_engines import Mover
from tests.benchmarks.conftest import Concluded
from zero_ext.cli.nvme_sweep import Cost
from zero_ext.config import ZeroConfig
from zero_ext.plan.trial import Launch, TrialOutcome
from zero_ext.plan.tune import search


def test_adam(concluded: Concluded) -> None:
    data, status = concluded(adam.main, 0.01, 2, False, False)
    rows = data["results"]
    assert [row["name"] for row in rows][1:] == [
        "zero_ext",
        "zero_ext, bfloat16 moments",
        "zero_ext, 8-bit moments",
        "torch, fused AdamW",
    ]
    assert all(len(row["rounds"]) == 2 and row["bytes"] > 0 for row in rows)
    assert status == int(any(row["met"] is False for row in rows))


def test_lamb(concluded: Concluded) -> None:
    data, status = concluded(lamb.main, 0.01, 4, 2)
    assert [row["name"].split(",")[0] for row in data["results"]] == [
        "read-modify-write stream",
        "zero_ext",
        "torch",
    ]
    own, peer = (row["rounds"] for row in data["results"][1:])
    assert status == int(not ratio_of_rounds(peer, own).at_least(lamb.PIPELINE_BAR))


def test_long_context(concluded: Concluded) -> None:
    data, status = concluded(long_context.main, 256, 512, 32, 3, "tiny", 2)
    rows, memory = data["results"], data["memory"]
    assert len(rows) == 6 and sum(data["documents"]) == 256
    assert all(len(row["seconds"]["peer"]) == 2 and row["apart"] < 2**-7 for row in rows)
    missed = not (all(row["met"] for row in rows) and all(data["memory_met"].values()))
    assert set(memory) == {"float32", "bfloat16"} and status == int(missed)


def test_compression(concluded: Concluded) -> None:
    data, status = concluded(compression.main, 0.01, 2, 2)
    rows = data["results"]
    assert {row["name"].split("_")[0] for row in rows} >= {"compress", "quantize", "requantize"}
    assert all(len(row["seconds"]) == len(row["copy_seconds"]) == 2 for row in rows)
    assert status == int(any(row["met"] is False for row in rows))


def test_overlap(concluded: Concluded) -> None:
    data, status = concluded(overlap.main, 2_000_000, 16, 2, 1)
    times = data["seconds"]
    assert {name: len(each) for name, each in times.items()} == {"stream": 2, "transfer": 2, "compute": 2}
    assert status == int(data["ratio"]["low"] < overlap.BAR)


def test_muon_nvme(concluded: Concluded) -> None:
    data, status = concluded(muon_nvme.main, "tiny", 2, 1)
    (run,) = data["runs"]
    assert all(len(run["seconds"][name]) == 2 for name in ("device", "transfers", "nvme"))
    assert run["read"] == run["written"] > 0 and status == int(bool(data["failures"]))


def test_checkpoint(concluded: Concluded, tmp_path: Path) -> None:
    data, status = concluded(checkpoint.main, 0.004, 1, tmp_path)
    rows = data["results"]
    names = [row["name"] for row in rows]
    assert [name for name in names if "zero_ext" not in name and "plain" not in name] == [
        *checkpoint_peers.SAVES,
        "one host copy",
        "torch DCP",
        *checkpoint_peers.LOADS,
    ]
    assert all(len(row["seconds"]) == 1 for row in rows)
    assert status == int(any(row["bar_met"] is False for row in rows))
    assert [each.name for each in tmp_path.iterdir()] == ["results"]


class NoTeam:
    """A team that starts no processes."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> NoTeam:
        return self

    def __exit__(self, *error: object) -> None: ...

    def ask(self, command: str, **arguments: Any) -> list[Any]:
        return []


@pytest.mark.parametrize(("seconds", "status"), [(2.0, 0), (2.1, 1)])
def test_monitor(seconds: float, status: int, concluded: Concluded, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(team: Any, runs: list[monitor.Run], *_: Any) -> None:
        for run in runs:
            run.on, run.off, run.own = [seconds], [2.0], [0.1]

    monkeypatch.setattr(monitor, "Team", NoTeam)
    monkeypatch.setattr(monitor, "measure", measure)
    data, ended = concluded(monitor.main, "tiny", 3, 1, 1)
    assert ended == status and [row["met"] for row in data["results"]] == [status == 0] * 3


@pytest.mark.parametrize(("identical", "status"), [(True, 0), (False, 1)])
def test_inference(
    identical: bool, status: int, concluded: Concluded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(run: inference.Run, *_: Any) -> None:
        run.forward, run.compute, run.read, run.parameter_bytes = [1.0], [1.0], [0.5], 100
        run.identical = identical

    monkeypatch.setattr(inference, "measure", measure)
    data, ended = concluded(inference.main, 0, 5.0, "1b", "tiny", 1, 1, 1)
    assert ended == status and len(data["results"]) == 1


@pytest.mark.parametrize(("theirs", "status"), [(1.2, 0), (0.8, 1)])
def test_aio(
    theirs: float, status: int, concluded: Concluded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def movers(folder: Path, nbytes: int, rounds: int, missing: list[str]) -> list[Mover]:
        found = [Mover("zero_ext, libaio", lambda _: (Cost(1.0, 0.1), 0.002), "libaio")]
        found.append(Mover("fio, libaio", lambda _: (Cost(theirs, 0.1), 0.002), "libaio"))
        for writing in (False, True):
            aio.turn_beside(found, found[-1], writing)
        missing.append("DeepSpeed's aio handle: not here")
        return found

    def storages(folder: Path, nbytes: int, rounds: int, missing: list[str]) -> list[aio.Passes]:
        found = [aio.Passes("arena in a file", aio.arena), aio.Passes("file per tensor", aio.file_per_tensor)]
        for passes in found:
            passes.setups = [0.5]
            for figures in (passes.seconds, passes.processor, passes.p99):
                figures.update({name: [1.0] for name, _ in aio.PASSES})
        return found

    monkeypatch.setattr(aio, "measure_engines", movers)
    monkeypatch.setattr(aio, "measure_storages", storages)
    data, ended = concluded(aio.main, 0.001, 1, tmp_path)
    assert data["not_measured"] == ["DeepSpeed's aio handle: not here"]
    engines = [row for row in data["results"] if row["name"].startswith("fio")]
    assert ended == status and [row["met"] for row in engines] == [status == 0] * 2


class PretendedLoaders(NoTeam):
    """Writes files; loading takes ``over`` bytes more than a shard and the largest tensor, or the experts."""

    over, experts = 0, 0

    def ask(self, command: str, **arguments: Any) -> list[Any]:
        if command == "save":
            return [Loader().save(**arguments)]
        if command == "base":
            return [100_000_000, 101_000_000]
        peak = {"seconds": 1.0, "peak": 60 + self.over, "prepared": 90, "parameters": 101}
        peak |= {"largest": 9 if self.experts == 0 else 8, "experts": self.experts}
        return [{**peak, "peak": 50}, peak]


@pytest.mark.parametrize(("over", "status"), [(0, 0), (1, 1)])
@pytest.mark.parametrize(("family", "experts"), [("bloom", 0), ("mixtral", 9)])
def test_load(
    over: int,
    status: int,
    family: str,
    experts: int,
    concluded: Concluded,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load, "Team", PretendedLoaders)
    monkeypatch.setattr(PretendedLoaders, "over", over)
    monkeypatch.setattr(PretendedLoaders, "experts", experts)
    data, ended = concluded(load.main, f"{family}-tiny", "bfloat16,float32", 2)
    assert ended == status
    # Parameters alone, in 2 and 4 bytes; what remains is the header.
    narrow, wide = (data[f"{family}-tiny, {dtype}"] for dtype in ("bfloat16", "float32"))
    assert wide["files"] > 1.8 * narrow["files"] > 0
    assert narrow["base"] == [100_000_000, 101_000_000]


@pytest.mark.parametrize(("seconds", "status"), [(1.9, 0), (2.1, 1)])
def test_plan(seconds: float, status: int, concluded: Concluded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar is for a trillion parameters."""
    commands: list[tuple[str, ...]] = []

    def seconds_of(arguments: tuple[str, ...]) -> float:
        commands.append(arguments)
        return seconds if arguments[0] == "1t" else 5.0

    monkeypatch.setattr(plan, "seconds_of", seconds_of)
    data, ended = concluded(plan.main, 3)
    assert ended == status and len(commands) == 3 * len(plan.PLANS)
    assert data["seconds"]["1t --machine dgx2-v100 --gpus 16"] == seconds


def test_plan_runs_the_command() -> None:
    assert plan.seconds_of(("125M", "--gpus", "1")) > 0


def test_simulation(concluded: Concluded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(simulation, "LARGE", ("llama-7b",))
    monkeypatch.setattr(simulation, "SCALED", ("gpt-1.2b", "dgx-a100", 1))
    monkeypatch.setattr(simulation, "WORLD_SIZES", (8, 16))
    monkeypatch.setattr(simulation, "SECONDS_BAR", 0.0)
    data, ended = concluded(simulation.main)
    assert ended == 1
    assert [one["training"]["world_size"] for one in data["scaling"]] == [8, 16]
    assert (tmp_path / "results" / "simulation.png").stat().st_size > 1000


@pytest.mark.parametrize(("repeated", "status"), [(True, 0), (False, 1)])
def test_tune(repeated: bool, status: int, concluded: Concluded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rates in the search are others than before it, the search is misled."""
    searching: list[bool] = []

    def run_trial(launch: Launch, config: ZeroConfig) -> TrialOutcome:
        micro = config.batch.micro_batch_size or 1
        return TrialOutcome("measured", float(1 / micro if searching and not repeated else micro))

    def misled(*arguments: Any) -> Any:
        searching.append(True)
        found = search(*arguments)
        searching.clear()
        return found

    monkeypatch.setattr(tune, "run_trial", run_trial)
    monkeypatch.setattr(tune, "search", misled)
    data, ended = concluded(tune.main, 2, 1, 2)
    assert ended == status and data["points"] == 24 and data["trials"] < 24 + 3 * 2
    assert data["share_of_best"]["median"] == (1.0 if repeated else 1 / 16)
