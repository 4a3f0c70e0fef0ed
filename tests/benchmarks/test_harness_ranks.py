"""Teams of real processes: in turn, in agreement, and loud when a rank fails."""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.harness.duel import run_in_turn
from benchmarks.harness.ranks import Team, TeamFailure, environment


@pytest.fixture
def team() -> Iterator[Team]:
    with Team("test", ranks=1, threads=1, timeout_seconds=60.0) as made:
        yield made


def test_contenders_run_in_turn_and_train_alike() -> None:
    records = run_in_turn(["plain@1"], "tiny", rounds=2, steps=1, warm_up=1, progress=str)
    record = records["plain@1"]
    assert len(record.seconds) == 2 and min(record.seconds) > 0
    assert len(record.losses) == 1 + 2 * 2 and record.losses[4] < record.losses[0]
    assert len(record.norms) == 3 and min(record.norms) > 0


def test_a_failing_rank_is_named_with_its_log(team: Team) -> None:
    with pytest.raises(
        TeamFailure, match=r"test: rank 0 ended during 'start'(?s:.*)unknown model shape 'huge'"
    ):
        team.ask("start", family="plain", options={}, shape="huge", threads=1)


def test_a_silent_rank_times_out(team: Team) -> None:
    assert team.ask("processor_seconds")[0] > 0
    os.kill(team._processes[0].pid, signal.SIGSTOP)
    team.timeout_seconds = 0.3
    with pytest.raises(TeamFailure, match=r"rank 0 gave no answer in 0.3 s during 'memory'"):
        team.ask("memory")


def test_ranks_see_what_a_launcher_would_set(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = environment(rank=1, ranks=2, threads=3, port=1234)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS")
    assert [variables[name] for name in names] == ["1", "1", "2", "1234", "3"]
    monkeypatch.setenv("WORLD_SIZE", "7")
    assert "WORLD_SIZE" not in environment(rank=0, ranks=1, threads=2, port=1234)


def test_ranks_of_peers_have_no_zero_ext_in_memory() -> None:
    modules = ["harness.worker", "harness.ranks", "peers.ddp", "peers.fsdp2", "peers.plain"]
    modules += ["peers.deepspeed_zero"] * (importlib.util.find_spec("deepspeed") is not None)
    imports = "; ".join(f"import benchmarks.{module}" for module in modules)
    found = "[name for name in sys.modules if name.split('.')[0] == 'zero_ext']"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {imports}; print('found', {found})"],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "found []"
