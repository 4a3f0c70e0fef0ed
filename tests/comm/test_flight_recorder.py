"""Records of collectives compared over a store: ranks at different collectives, and slow ranks."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.comm.flight_recorder import FlightRecorder, MismatchedCollectivesError, RecordedCollective
from zero_ext.comm.process_group import make_collectives


def recorders(count: int = 2) -> list[FlightRecorder]:
    store = dist.HashStore()
    return [FlightRecorder(rank, store) for rank in range(count)]


def begin(
    recorder: FlightRecorder, name: str, label: str, peers: tuple[int, ...] = (0, 1)
) -> RecordedCollective:
    return recorder.channel(name, (0, 1)).begin(label, peers)


def wait_in(recorder: FlightRecorder, call: RecordedCollective) -> None:
    recorder.waiting = call
    recorder.check()


def test_different_collectives_at_the_same_position_are_named_on_both_ranks() -> None:
    first, second = recorders()
    reasons: list[str] = []
    first.abort = reasons.append
    for recorder in (first, second):
        begin(recorder, "gathers", "gather of unit 'a'")
    wait_in(first, begin(first, "gathers", "gather of unit 'b'"))
    location = r"\(test_flight_recorder\.py:\d+: recorder\.check\(\)\)"
    pattern = (
        rf"rank 1: gather of unit 'c' {location}: expected the same collective on all ranks, "
        rf"got gather of unit 'b' {location} on rank 0\. Make the same calls"
    )
    with pytest.raises(MismatchedCollectivesError, match=pattern):
        wait_in(second, begin(second, "gathers", "gather of unit 'c'"))
    with pytest.raises(
        MismatchedCollectivesError, match=r"rank 0: gather of unit 'b'.*gather of unit 'c'.*rank 1"
    ):
        first.check()
    assert len(reasons) == 1 and "gather of unit 'c'" in reasons[0]


def test_an_earlier_difference_is_found_after_one_rank_went_on() -> None:
    first, second = recorders()
    begin(first, "gathers", "broadcast of 'a'", (1,))
    wait_in(first, begin(first, "gathers", "gather of unit 'b'"))
    with pytest.raises(
        MismatchedCollectivesError, match=r"rank 1: gather of unit 'b' .*got broadcast of 'a' .*on rank 0"
    ):
        wait_in(second, begin(second, "gathers", "gather of unit 'b'"))
    with pytest.raises(
        MismatchedCollectivesError, match=r"rank 0: broadcast of 'a' .*got gather of unit 'b'.*rank 1"
    ):
        first.check()


def test_ranks_that_wait_for_each_other_on_two_transports_are_found() -> None:
    first, second = recorders()
    wait_in(first, begin(first, "gathers", "gather of unit 'a'"))
    with pytest.raises(
        MismatchedCollectivesError, match=r"rank 1: agreement on b .*got gather of unit 'a' .*0"
    ):
        wait_in(second, begin(second, "reductions", "agreement on b"))


@pytest.mark.parametrize("case", ["begun", "independent", "busy", "same", "no store"])
def test_slow_ranks_are_left_alone(case: str) -> None:
    first, second = recorders()
    if case == "no store":
        second = FlightRecorder(1, None)
    call = begin(first, "gathers", "a")
    if case == "begun":
        begin(second, "gathers", "a")  # in flight
    if case != "busy":
        wait_in(first, call)
    if case == "same":
        wait_in(second, begin(second, "gathers", "a"))
    else:
        peers = () if case == "independent" else (0, 1)
        wait_in(second, begin(second, "reductions", "b", peers))
    first.check()


def test_a_rank_raises_the_error_of_one_that_it_waits_for() -> None:
    first, second, third = recorders(3)
    wait_in(first, begin(first, "gathers", "a"))
    with pytest.raises(MismatchedCollectivesError):
        wait_in(second, begin(second, "gathers", "b"))
    call = third.channel("gathers", (1, 2)).begin("c")
    with pytest.raises(
        MismatchedCollectivesError, match=r"rank 2: c .*got its error: rank 1: b .*got a .*on rank 0"
    ):
        wait_in(third, call)


def test_a_rank_aborts_although_the_store_has_ended() -> None:
    first, second = recorders()
    reasons: list[str] = []
    second.abort = reasons.append
    wait_in(first, begin(first, "gathers", "a"))
    with (
        mock.patch.object(FlightRecorder, "_publish", side_effect=[None, RuntimeError("no store")]),
        pytest.raises(MismatchedCollectivesError, match="rank 1: b "),
    ):
        wait_in(second, begin(second, "gathers", "b"))
    assert len(reasons) == 1


def test_call_stacks_are_listed_without_garbage_collection() -> None:
    recorder = recorders()[0]
    recorder.waiting = begin(recorder, "gathers", "a")
    collects: list[bool] = []

    def call_stacks() -> dict[int, Any]:
        collects.append(gc.isenabled())
        return {}

    with mock.patch("sys._current_frames", call_stacks):
        thread = threading.Thread(target=recorder.check)
        thread.start()
        thread.join()
    assert collects and not any(collects) and gc.isenabled()


@on_ranks(2)
def test_gathers_against_sums_are_an_error_on_both_ranks(world: World) -> None:
    collectives = make_collectives(world.group, 20.0)
    began = time.monotonic()
    with pytest.raises(MismatchedCollectivesError) as caught:
        if world.rank == 0:
            collectives.gather(torch.empty(4), torch.ones(2), "gather", "gather of unit 'x'").wait()
        else:
            collectives.sum_(torch.ones(3), "agreement on y")
    assert "gather of unit 'x', 4 elements" in str(caught.value)
    assert "agreement on y, 3 elements" in str(caught.value) and time.monotonic() - began < 5
    with pytest.raises(RuntimeError, match="expected the same collective on all ranks"):
        collectives.sum_(torch.ones(3), "after it")
    world.barrier()


@on_ranks(3)
def test_a_third_rank_raises_as_well(world: World) -> None:
    collectives = make_collectives(world.group, 20.0)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)agreement on [abc].*expected the same"):
        collectives.sum_(torch.ones(3), f"agreement on {'aab'[world.rank]}")
    assert time.monotonic() - began < 5
    world.barrier()


@on_ranks(2)
def test_a_rank_that_is_only_slow_is_waited_for(world: World) -> None:
    collectives = make_collectives(world.group, 20.0)
    if world.rank == 0:
        flat = torch.empty(4)
        pending = collectives.gather(flat, torch.ones(2), "gather", "gather of unit 'x'")
        time.sleep(1.5)
        assert collectives.sum_(torch.ones(1), "agreement").item() == 2
        pending.wait()
    else:
        assert collectives.sum_(torch.ones(1), "agreement").item() == 2
        time.sleep(1.5)
        collectives.gather(torch.empty(4), torch.ones(2), "gather", "gather of unit 'x'").wait()
    world.barrier()


@on_ranks(2)
def test_an_aborted_rank_raises_its_own_reason(world: World) -> None:
    collectives = make_collectives(world.group, 20.0)
    if world.rank == 1:
        collectives.abort("rank 1: the disk is gone")
    for number in range(2):
        with pytest.raises(RuntimeError, match="failed: rank 1: the disk is gone"):
            collectives.sum_(torch.ones(1), f"agreement on {'ab'[world.rank]}{number}")
    world.barrier()
