"""The prefetching thread: bounded, in order, honest about errors, and gone when nobody listens."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Generator

import pytest

from zero_ext.data.prefetch import BatchPrefetcher


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "zero_ext-prefetch"]


def wait_until_no_threads() -> None:
    limit = time.monotonic() + 10
    while threads():
        assert time.monotonic() < limit, "the prefetching thread outlived its consumer"
        time.sleep(0.001)


class Counted:
    """Counts how far the producer got, and whether it was closed."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.produced = 0
        self.closed = False

    def items(self) -> Generator[int]:
        try:
            for number in range(self.end):
                self.produced += 1
                yield number
        finally:
            self.closed = True


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_items_arrive_in_order_and_not_too_far_ahead(depth: int) -> None:
    source = Counted(50)
    for number in (prefetcher := BatchPrefetcher(source.items(), depth)):
        assert number < source.produced <= number + 2 + depth
        if number == 10:
            time.sleep(0.02)
    assert number == 49
    with pytest.raises(StopIteration):
        next(prefetcher)
    wait_until_no_threads()


def test_the_producer_works_while_the_consumer_does() -> None:
    ready = threading.Event()

    def source() -> Generator[int]:
        yield 0
        ready.set()
        yield 1

    prefetcher = BatchPrefetcher(source(), 2)
    assert next(prefetcher) == 0
    assert ready.wait(10)
    assert list(prefetcher) == [1]


@pytest.mark.parametrize("failure", [KeyError("lost"), SystemExit(3), MemoryError()])
def test_a_failure_is_raised_in_order(failure: BaseException) -> None:
    def source() -> Generator[int]:
        yield 0
        yield 1
        raise failure

    prefetcher = BatchPrefetcher(source(), 5)
    assert [next(prefetcher), next(prefetcher)] == [0, 1]
    with pytest.raises(type(failure)) as caught:
        next(prefetcher)
    assert caught.value is failure
    wait_until_no_threads()


@pytest.mark.parametrize("ending", ["dropped", "closed"])
def test_the_thread_ends_with_its_consumer(ending: str) -> None:
    source = Counted(10**9)
    prefetcher = BatchPrefetcher(source.items(), 3)
    next(prefetcher)
    if ending == "closed":
        prefetcher.close()
        with pytest.raises(StopIteration):
            next(prefetcher)
    else:
        del prefetcher
        gc.collect()
    wait_until_no_threads()
    assert source.closed


def test_depth_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="depth: expected at least 1, got 0"):
        BatchPrefetcher(Counted(1).items(), 0)


def test_a_forked_child_raises_instead_of_waiting() -> None:
    program = """
import os, threading, time
from zero_ext.data.prefetch import BatchPrefetcher
go = threading.Event()
def source():
    yield 0
    go.wait()
    yield 1
items = BatchPrefetcher(source(), 1)
next(items)
child = os.fork()
if child == 0:
    try:
        next(items)
    except RuntimeError as error:
        os._exit(7 if "forked" in str(error) else 1)
    os._exit(2)
status = os.waitpid(child, 0)[1]
go.set()
assert os.waitstatus_to_exitcode(status) == 7, status
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=400)


def test_the_interpreter_exits_during_a_loop() -> None:
    program = """
import time, torch
from zero_ext.data.prefetch import BatchPrefetcher
def source():
    while True:
        torch.randn(400, 400) @ torch.randn(400, 400)
        yield 1
items = BatchPrefetcher(source(), 2)
next(items)
print("last line")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=400)
    assert (done.returncode, done.stdout, done.stderr) == (0, "last line\n", "")
