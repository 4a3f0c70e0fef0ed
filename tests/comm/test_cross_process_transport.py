"""Transport between processes of one host: what arrives, what it falls back to, what it leaves behind."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext import ops
from zero_ext.comm import CrossProcessTransport, ProcessGroupTransport, fastest_host_transport
from zero_ext.comm.cross_process_transport import remove_abandoned_memory
from zero_ext.comm.transport import PointToPointTransport

MEMORY = Path("/dev/shm")


def values(world: World, source: int, destination: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(world.seed + 100 * source + 10 * destination + number)
    dtype = (torch.float32, torch.bfloat16, torch.int64)[number % 3]
    return (100 * torch.randn(1 + 37 * number, generator=generator)).to(dtype)


@on_ranks(2, 3, 4)
def test_payloads_arrive_complete_and_in_order(world: World) -> None:
    with mock.patch.object(ops, "cross_process_open", wraps=ops.cross_process_open) as opened:
        transport = fastest_host_transport(world.group, 20.0)
    assert isinstance(transport, CrossProcessTransport)
    segment = Path("/dev/shm" + opened.call_args.args[1])
    assert not segment.exists(), "the segment's name must be gone once all have joined"
    peers = [rank for rank in range(world.size) if rank != world.rank]
    sends, receives, works = [], [], []
    for number in range(7):
        sends.append([(peer, values(world, world.rank, peer, number)) for peer in peers])
        receives.append([(peer, values(world, peer, world.rank, number).fill_(77)) for peer in peers])
        works += transport.start(sends[-1], receives[-1])
    for work in works:
        work.wait()
    for number, batch in enumerate(receives):
        for peer, got in batch:
            assert torch.equal(got, values(world, peer, world.rank, number))
    total = torch.tensor([world.rank + 1])
    transport.all_reduce(total).wait()
    assert int(total) == world.size * (world.size + 1) // 2


@on_ranks(2, 3)
def test_all_ranks_fall_back_if_one_may_not_read_another(world: World) -> None:
    refusing = world.rank == world.size - 1
    with mock.patch.object(
        ops, "cross_process_connect", (lambda handle: False) if refusing else ops.cross_process_connect
    ):
        assert isinstance(fastest_host_transport(world.group, 20.0), ProcessGroupTransport)


@on_ranks(2)
def test_a_payload_of_another_size_is_an_error_at_the_receiver(world: World) -> None:
    transport = fastest_host_transport(world.group, 20.0)
    if world.rank == 0:
        for work in transport.start([(1, torch.zeros(4))], []):
            work.wait()
        return
    target = torch.full((5,), 3.0)
    (work,) = transport.start([], [(0, target)])
    with pytest.raises(RuntimeError, match="rank 0 sent 16 bytes where 20 were expected"):
        work.wait()
    assert target.tolist() == [3.0] * 5


@on_ranks(2)
def test_a_payload_of_another_tag_is_an_error_at_the_receiver(world: World) -> None:
    transport = fastest_host_transport(world.group, 20.0)
    if world.rank == 0:
        for work in transport.start([(1, torch.zeros(5))], [], 3):
            work.wait()
        return
    target = torch.full((5,), 3.0)
    (work,) = transport.start([], [(0, target)], 4)
    with pytest.raises(RuntimeError, match="rank 0 sent something else in its place"):
        work.wait()
    assert target.tolist() == [3.0] * 5


@on_ranks(2, 3)
def test_peers_of_an_aborted_rank_raise_its_reason(world: World) -> None:
    transport = fastest_host_transport(world.group, 20.0)
    others = [rank for rank in range(world.size) if rank != world.rank]
    first, second = torch.full((5,), 1.0 + world.rank), torch.zeros(5)
    if world.rank == 0:
        transport.start([(peer, first) for peer in others], [])
        transport.abort("rank 0: the disk is gone")
        for sends, receives in (([(1, second)], []), ([], [(1, second)])):
            with pytest.raises(RuntimeError, match="the disk is gone"):
                transport.start(sends, receives)
        with pytest.raises(RuntimeError, match="the disk is gone"):
            transport.all_reduce(torch.zeros(1))
        world.barrier()
        return
    (sent,) = transport.start([], [(0, second)])
    sent.wait()
    assert second.tolist() == [1.0] * 5  # what came before arrives
    began = time.monotonic()
    for work in transport.start([(0, first)], [(0, second)]):
        with pytest.raises(RuntimeError, match="rank 0: the disk is gone"):
            work.wait()
    assert time.monotonic() - began < 10 and second.tolist() == [1.0] * 5
    world.barrier()


@on_ranks(2)
def test_a_payload_is_not_read_from_memory_that_its_sender_has_freed(world: World) -> None:
    transport: PointToPointTransport | None = fastest_host_transport(world.group, 20.0)
    assert isinstance(transport, CrossProcessTransport)
    target = torch.full((5,), 3.0)
    if world.rank == 0:
        transport.start([(1, torch.ones(5))], [])
        transport.abort("rank 0: the disk is gone")
        transport = None
        world.barrier()
        return
    world.barrier()
    (work,) = transport.start([], [(0, target)])
    with pytest.raises(RuntimeError, match="rank 0: the disk is gone"):
        work.wait()
    assert target.tolist() == [3.0] * 5


@on_ranks(2)
def test_nothing_arrives_after_a_wait_has_timed_out(world: World) -> None:
    transport = fastest_host_transport(world.group, 0.2 if world.rank == 1 else 20.0)
    target = torch.full((5,), 3.0)
    if world.rank == 1:
        (work,) = transport.start([], [(0, target)])
        with pytest.raises(RuntimeError, match=r"no answer from rank 0 within 0\.2"):
            work.wait()
        world.barrier()
    else:
        world.barrier()
        (work,) = transport.start([(1, torch.ones(5))], [])
        with pytest.raises(RuntimeError, match="rank 1 has closed its connections, or waited longer"):
            work.wait()
    world.barrier()
    assert target.tolist() == [3.0] * 5


def join_and_die(folder: str, rank: int, point: str, ending: str) -> None:
    """Join the transport of two ranks; end as ``ending`` says before or after the operation ``point``."""

    def end(*arguments: Any) -> Any:
        if ending == "killed before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = operation(*arguments)
        if ending == "killed after":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyboardInterrupt if ending == "interrupted" else AssertionError(result)

    store = dist.FileStore(f"{folder}/store", 2)
    group = dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=20))
    if point:
        operation = getattr(ops, point)
        setattr(ops, point, end)
    fastest_host_transport(cast(dist.ProcessGroup, group), 20.0)


def end_joining(folder: Path, ends: Sequence[tuple[str, str]]) -> tuple[set[str], list[Any]]:
    """Return what two processes that end as ``ends`` say left in shared memory, and the processes."""
    context = multiprocessing.get_context("forkserver")
    ranks = [
        context.Process(target=join_and_die, args=(str(folder), rank, *end), daemon=True)
        for rank, end in enumerate(ends)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode is not None
    return {path.name for path in MEMORY.glob(f"zero_ext-{ranks[0].pid}-*")}, ranks


ENDS = [
    (("cross_process_open", "killed before"), ("", "")),
    (("cross_process_open", "killed after"), ("", "")),
    (("cross_process_open", "interrupted"), ("", "")),
    (("", ""), ("cross_process_open", "killed before")),
    (("", ""), ("cross_process_open", "killed after")),
    (("cross_process_unlink", "killed before"), ("", "")),
    (("", ""), ("cross_process_unlink", "interrupted")),
    (("cross_process_connect", "killed before"), ("cross_process_connect", "killed after")),
]


@pytest.mark.parametrize("ends", ENDS, ids=lambda ends: " ".join(" ".join(end) for end in ends))
def test_a_rank_that_ends_while_it_joins_leaves_no_memory(
    tmp_path: Path, ends: Sequence[tuple[str, str]]
) -> None:
    left, ranks = end_joining(tmp_path, ends)
    assert not left
    for rank, (_, ending) in zip(ranks, ends, strict=True):
        assert rank.exitcode == (-signal.SIGKILL if "killed" in ending else 1 if ending else rank.exitcode)


def test_the_next_start_removes_what_killed_ranks_left(tmp_path: Path) -> None:
    both = [("cross_process_open", "killed after"), ("cross_process_unlink", "killed before")]
    left, ranks = end_joining(tmp_path, both)
    (name,) = left
    path = MEMORY / name
    living = MEMORY / f"zero_ext-{os.getpid()}-0"
    other = MEMORY / f"zero_ext-{ranks[0].pid}-0.other"
    try:
        living.touch()
        other.touch()
        for each in (living, other):
            os.utime(each, (0, 0))
        assert remove_abandoned_memory() == []  # it may be that of a rank in another container
        os.utime(path, (0, 0))
        with mock.patch("os.geteuid", return_value=os.geteuid() + 1):
            assert remove_abandoned_memory() == []
        (tmp_path / "store").unlink(missing_ok=True)
        end_joining(tmp_path, [("", ""), ("", "")])
        assert not path.exists() and living.exists() and other.exists()
    finally:
        for each in (path, living, other):
            each.unlink(missing_ok=True)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(RuntimeError, match="handle -1 is not open"):
        ops.cross_process_send(-1, 0, torch.zeros(1), 0)
    with pytest.raises(RuntimeError, match="rank: expected 0 to 1, got 2"):
        ops.cross_process_open(-2, "/zero_ext-never", 2, 2, False)
    with pytest.raises(RuntimeError, match=r"zero_ext-never.*No such file"):
        ops.cross_process_open(-2, "/zero_ext-never", 1, 2, False)
    with pytest.raises(RuntimeError, match="contiguous"):
        ops.cross_process_receive(-1, 0, torch.zeros(4, 4).t(), 0)
