"""The rank pool itself: results come back, failures are seen and survived."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.multi.on_ranks import on_ranks
from tests.multi.pool import MOST_GROUPS, MOST_RANKS, RankFailure, RankPool
from tests.multi.process_states import reaches
from tests.multi.rank import World

THIS_MODULE = "tests.multi.test_pool"


def sum_of_ranks(world: World, factor: int) -> dict[str, Any]:
    total = torch.tensor([float(world.rank * factor)])
    dist.all_reduce(total, group=world.group)
    return {"total": total, "rank": world.rank, "pid": os.getpid()}


def raise_on(world: World, rank: int) -> None:
    if world.rank == rank:
        raise ValueError(f"no good on rank {rank}")
    world.barrier()


def die_on(world: World, rank: int, by: int = signal.SIGKILL) -> None:
    if world.rank == rank:
        os.kill(os.getpid(), by)


def hang_on(world: World, rank: int) -> None:
    if world.rank == rank:
        time.sleep(600)


def wait_for_end(world: World) -> None:
    time.sleep(600)


@pytest.fixture
def small_pool() -> Any:
    pool = RankPool(2)
    yield pool
    pool.close()


def test_the_pool_used_least_recently_ends_where_another_needs_its_memory() -> None:
    pools = [RankPool(size) for size in (2, MOST_RANKS - 2, 2)]
    try:

        def processes(number: int) -> set[int]:
            return {
                answer["pid"] for answer in pools[number].run(2, f"{THIS_MODULE}:sum_of_ranks", {"factor": 1})
            }

        first, second = processes(0), processes(1)
        assert processes(0) == first and processes(1) == second  # both fit
        third = processes(2)
        assert processes(1) == second and processes(2) == third
        assert not any(Path(f"/proc/{pid}").exists() for pid in first)
        assert processes(0).isdisjoint(first)  # started again
        assert not any(Path(f"/proc/{pid}").exists() for pid in second)
    finally:
        for pool in pools:
            pool.close()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_of_every_rank(rank_pool: RankPool, world_size: int) -> None:
    results = rank_pool.run(world_size, f"{THIS_MODULE}:sum_of_ranks", {"factor": 10})
    assert [result["rank"] for result in results] == list(range(world_size))
    wanted = 10.0 * sum(range(world_size))
    assert all(result["total"].item() == wanted for result in results)


def test_processes_are_reused(rank_pool: RankPool) -> None:
    first, second = (rank_pool.run(4, f"{THIS_MODULE}:sum_of_ranks", {"factor": 1}) for _ in range(2))
    assert [one["pid"] for one in first] == [one["pid"] for one in second]


def test_ranks_without_work_are_stopped(small_pool: RankPool) -> None:
    for _ in range(2):
        found = small_pool.run(2, f"{THIS_MODULE}:sum_of_ranks", {"factor": 1})
        assert all(reaches(rank["pid"], "T") for rank in found)


KILLED = """
import os, pathlib, signal, sys
from tests.multi.pool import RankPool

if __name__ == "__main__":
    found = RankPool(2).run(2, "tests.multi.test_pool:sum_of_ranks", {"factor": 1})
    pathlib.Path(sys.argv[1]).write_text(" ".join(str(rank["pid"]) for rank in found))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_stopped_ranks_end_with_a_killed_run(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, script, tmp_path / "ranks"], env=environment, check=False)
    ranks = [int(pid) for pid in (tmp_path / "ranks").read_text().split()]
    assert done.returncode == -signal.SIGKILL and len(ranks) == 2
    assert all(reaches(rank, "XZ") for rank in ranks)


def test_failures_name_the_rank_and_the_pool_comes_back(small_pool: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"ranks \[0, 1\](?s:.*)ValueError: no good on rank 1"):
        small_pool.run(2, f"{THIS_MODULE}:raise_on", {"rank": 1}, timeout=0.5)
    with pytest.raises(RankFailure, match=r"rank 0 ---\nthe process died, exit code -9"):
        small_pool.run(2, f"{THIS_MODULE}:die_on", {"rank": 0})
    with pytest.raises(RankFailure, match=r"rank 1 ---\nthe process died, exit code -11(?s:.*)in die_on"):
        small_pool.run(2, f"{THIS_MODULE}:die_on", {"rank": 1, "by": int(signal.SIGSEGV)})
    with pytest.raises(RankFailure, match=r"rank 1 ---\nno answer(?s:.*)in hang_on"):
        small_pool.run(2, f"{THIS_MODULE}:hang_on", {"rank": 1}, timeout=1.0)
    assert [result["rank"] for result in small_pool.run(2, f"{THIS_MODULE}:sum_of_ranks", {"factor": 2})] == [
        0,
        1,
    ]


@on_ranks(2, 3)
@pytest.mark.parametrize("word", ["a", "b"])
def test_the_decorator_runs_bodies_on_ranks(world: World, word: str) -> None:
    assert world.everyone((world.rank, word)) == [(rank, word) for rank in range(world.size)]
    assert len(set(world.everyone(world.seed))) == 1


def leave_groups(world: World, count: int) -> int:
    for _ in range(count):
        init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("pp", "dp"))
    return os.getpid()


def test_ranks_with_many_groups_are_replaced(small_pool: RankPool) -> None:
    first, second = (small_pool.run(2, f"{THIS_MODULE}:leave_groups", {"count": 1}) for _ in range(2))
    assert first == second
    assert small_pool.run(2, f"{THIS_MODULE}:leave_groups", {"count": MOST_GROUPS}) == second
    assert not set(small_pool.run(2, f"{THIS_MODULE}:leave_groups", {"count": 0})) & set(second)


def name_of_a_group(world: World) -> str:
    return dist.new_group(list(range(world.size))).group_name


def test_groups_of_calls_on_fewer_ranks_lend_no_name_to_later_ones(small_pool: RankPool) -> None:
    (alone,) = small_pool.run(1, f"{THIS_MODULE}:name_of_a_group", {})
    first, second = small_pool.run(2, f"{THIS_MODULE}:name_of_a_group", {})
    assert first == second != alone
