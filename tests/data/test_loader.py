"""The loader as training uses it: ranks in step, positions by sample, errors that name it, threads."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

from zero_ext.data import ShardedLoader
from zero_ext.data.loader import BatchPrefetcher


class Squares:
    """Samples are (index, index squared)."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index, index * index


def ranks(samples: int, micro_batch_size: int, world_size: int, **options: Any) -> list[ShardedLoader]:
    return [
        ShardedLoader(Squares(samples), micro_batch_size, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


def step(loops: list[Any]) -> list[int]:
    """One batch on every rank; the samples that all together got."""
    return [int(index) for loop in loops for index in next(loop)[0]]


def test_batches_are_collated_and_sharded() -> None:
    loaders = ranks(12, 3, 2, shuffle=False)
    first = [next(iter(loader)) for loader in loaders]
    assert torch.equal(first[0][0], torch.tensor([0, 1, 2]))
    assert torch.equal(first[1][0], torch.tensor([3, 4, 5]))
    assert torch.equal(first[1][1], torch.tensor([9, 16, 25]))


def test_collate_fn_gets_the_samples() -> None:
    loader = ShardedLoader(Squares(4), 2, shuffle=False, collate_fn=lambda samples: samples)
    assert list(loader) == [[(0, 0), (1, 1)], [(2, 4), (3, 9)]]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_epochs_differ_and_hold_every_sample_once(prefetch: int) -> None:
    loader = ShardedLoader(Squares(24), 4, seed=3, prefetch=prefetch)
    epochs = [[int(index) for batch in loader for index in batch[0]] for _ in range(3)]
    assert loader.epoch == 3
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_does_not_depend_on_the_world_size() -> None:
    consumed = []
    for world_size, micro_batch_size in ((1, 8), (2, 4), (4, 2), (8, 1)):
        loops = [iter(loader) for loader in ranks(64, micro_batch_size, world_size, seed=9)]
        consumed.append([step(loops) for _ in range(8)])
    assert all(other == consumed[0] for other in consumed[1:])


def test_an_uneven_epoch_is_filled_up_from_the_next() -> None:
    loaders = ranks(10, 2, 2, shuffle=False)
    passes = [[[batch[0].tolist() for batch in loader] for loader in loaders] for _ in range(2)]
    assert passes[0] == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]
    assert passes[1] == [[[2, 3], [6, 7]], [[4, 5], [8, 9]]]
    assert [len(loader) for loader in loaders] == [3, 3]


def test_drop_last_leaves_the_remainder_out() -> None:
    loader = ShardedLoader(Squares(10), 4, shuffle=False, drop_last=True)
    assert [batch[0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [batch[0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(loader) == 2


def test_a_data_set_smaller_than_a_batch_is_read_over_and_over() -> None:
    loader = ShardedLoader(Squares(3), 7, shuffle=False)
    assert [batch[0].tolist() for batch in loader] == [[0, 1, 2, 0, 1, 2, 0]]
    assert (loader.state_dict()["epoch"], loader.state_dict()["sample"]) == (2, 1)


@settings(max_examples=25, deadline=None)
@given(
    samples=st.integers(3, 40),
    seed=st.integers(0, 1000),
    segments=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.integers(0, 3)),
        min_size=2,
        max_size=5,
    ),
)
def test_a_resume_at_another_world_size_repeats_and_skips_nothing(
    samples: int, seed: int, segments: list[tuple[int, int, int, int]]
) -> None:
    saved: str | None = None
    consumed: list[int] = []
    for world_size, micro_batch_size, batches, prefetch in segments:
        loaders = ranks(samples, micro_batch_size, world_size, seed=seed, prefetch=prefetch)
        if saved is not None:
            for loader in loaders:
                loader.load_state_dict(json.loads(saved))
        loops = [iter(loader) for loader in loaders]
        for _ in range(batches):
            try:
                consumed += step(loops)
            except StopIteration:
                loops = [iter(loader) for loader in loaders]
                consumed += step(loops)
        states = {json.dumps(loader.state_dict()) for loader in loaders}
        assert len(states) == 1, "the ranks disagree on the position"
        saved = states.pop()
    for begin in range(0, len(consumed), samples):
        epoch = consumed[begin : begin + samples]
        assert len(set(epoch)) == len(epoch)  # a whole epoch of distinct samples has them all


def test_prefetched_batches_do_not_count_as_consumed() -> None:
    loader = ShardedLoader(Squares(100), 5, prefetch=4)
    loop = iter(loader)
    next(loop)
    limit = time.monotonic() + 10
    while len(loop._source._channel._ready) < 4:
        assert time.monotonic() < limit
        time.sleep(0.001)
    assert loader.state_dict()["sample"] == 5


def test_a_loop_left_early_is_continued() -> None:
    loader = ShardedLoader(Squares(12), 2, shuffle=False)
    for batch in loader:
        if batch[0][0] == 4:
            break
    assert [batch[0].tolist() for batch in loader] == [[6, 7], [8, 9], [10, 11]]


def test_set_epoch_moves_only_to_another_epoch() -> None:
    loader = ShardedLoader(Squares(12), 2, seed=1)
    next(iter(loader))
    loader.set_epoch(0)
    assert loader.state_dict()["sample"] == 2
    loader.set_epoch(5)
    assert (loader.epoch, loader.state_dict()["sample"]) == (5, 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda loader: iter(loader), "a newer loop"),
        (lambda loader: loader.load_state_dict(loader.state_dict()), "load_state_dict moved"),
        (lambda loader: loader.set_epoch(3), "set_epoch moved"),
    ],
)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_superseded_loop_raises(change: Callable[[ShardedLoader], Any], reason: str, prefetch: int) -> None:
    loader = ShardedLoader(Squares(12), 2, prefetch=prefetch)
    loop = iter(loader)
    next(loop)
    changed = change(loader)
    with pytest.raises(RuntimeError, match=reason):
        next(loop)
    del changed


class Broken(Squares):
    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == 7:
            raise KeyError("page missing")
        return super().__getitem__(index)


class BrokenBatches(Broken):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, int]]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize(
    ("dataset", "named"),
    [(Broken(12), r"sample 7 \(rank 0, epoch 0\)"), (BrokenBatches(12), r"samples \[6, 7\]")],
)
def test_an_error_of_the_data_set_names_the_sample(dataset: Squares, named: str, prefetch: int) -> None:
    loader = ShardedLoader(dataset, 2, shuffle=False, prefetch=prefetch)
    loop = iter(loader)
    assert [next(loop)[0].tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(RuntimeError, match=named + ".*KeyError: 'page missing'") as caught:
        next(loop)
    assert isinstance(caught.value.__cause__, KeyError)
    assert loader.state_dict()["sample"] == 6
    with pytest.raises(RuntimeError, match="it failed with RuntimeError"):
        next(loop)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_error_of_collate_names_the_samples(prefetch: int) -> None:
    def collate(samples: list[Any]) -> Any:
        if samples[0][0] == 4:
            raise StopIteration("a stray one must not look like the end of the epoch")
        return samples

    loader = ShardedLoader(Squares(12), 2, shuffle=False, collate_fn=collate, prefetch=prefetch)
    with pytest.raises(RuntimeError, match=r"collate_fn: .* samples \[4, 5\].*StopIteration"):
        list(loader)


def test_reading_many_at_once_is_used_and_checked() -> None:
    class Many(Squares):
        def __getitem__(self, index: int) -> tuple[int, int]:
            raise AssertionError("read one by one")

        def __getitems__(self, indices: list[int]) -> list[tuple[int, int]]:
            return [(index, 0) for index in indices][: self.most]

        most = 4

    dataset = Many(8)
    loader = ShardedLoader(dataset, 4, shuffle=False)
    assert [batch[0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    dataset.most = 3
    with pytest.raises(RuntimeError, match=r"__getitems__: expected 4 samples.*, got 3\."):
        next(iter(ShardedLoader(dataset, 4)))


def test_torch_data_sets_load() -> None:
    values = torch.randn(9, 4, dtype=torch.float64)
    got = torch.cat([batch[0] for batch in ShardedLoader(TensorDataset(values), 3, shuffle=False)])
    assert torch.equal(got, values)


def test_dropping_the_loop_and_the_loader_frees_everything() -> None:
    class Tracked(Squares):
        pass

    alive = threading.active_count()
    dataset = Tracked(10**6)
    loader = ShardedLoader(dataset, 2)
    for _ in loader:
        break
    del dataset, loader
    limit = time.monotonic() + 10
    while threading.active_count() > alive or any(type(found) is Tracked for found in gc.get_objects()):
        gc.collect()
        assert time.monotonic() < limit, "the loader's thread or data set stayed"
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"samples": 13}, "expected samples 12.*, got 13"),
        ({"seed": 1}, "expected seed 0.*, got 1"),
        ({"seed": True}, "expected seed 0.*, got True"),
        ({"shuffle": False}, "expected shuffle True.*, got False"),
        ({"shuffle": 1}, "expected shuffle True.*, got 1"),
        ({"format": 2}, "expected format 1.*, got 2"),
        ({"epoch": -1}, "epoch: expected an integer of at least 0, got -1"),
        ({"epoch": 1.0}, r"epoch: expected an integer .*, got 1.0 \(float\)"),
        ({"sample": 12}, "sample: expected an integer from 0 to 11, got 12"),
        ({"sample": None}, "sample: expected .*, got None"),
        ({"more": 1}, "keys"),
    ],
)
def test_a_foreign_state_is_refused_and_changes_nothing(change: dict[str, Any], said: str) -> None:
    loader = ShardedLoader(Squares(12), 2)
    loop = iter(loader)
    next(loop)
    before = loader.state_dict()
    with pytest.raises(ValueError, match=said):
        loader.load_state_dict({**before, **change})
    assert loader.state_dict() == before
    next(loop)


@pytest.mark.parametrize("state", [None, [], {"epoch": 0}, "position"])
def test_a_state_of_another_form_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="a mapping with the keys"):
        ShardedLoader(Squares(12), 2).load_state_dict(state)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size: expected .*, got 0"),
        ({"micro_batch_size": 2.0}, r"micro_batch_size: expected .*, got 2.0 \(float\)"),
        ({"world_size": 0}, "world_size: expected .*, got 0"),
        ({"rank": 2, "world_size": 2}, "rank: expected an integer from 0 to 1, got 2"),
        ({"rank": -1}, "rank: expected .*, got -1"),
        ({"seed": "a"}, "seed: expected an integer, got 'a'"),
        ({"prefetch": -1}, "prefetch: expected .*, got -1"),
        ({"dataset": Squares(0)}, "dataset: expected a length of at least 1, got 0"),
        ({"micro_batch_size": 13, "drop_last": True}, "dataset: expected a length of at least 13 .*, got 12"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ShardedLoader(**{"dataset": Squares(12), "micro_batch_size": 2, **arguments})


class Streamed(Endless):
    def __len__(self) -> int:
        return 100


@pytest.mark.parametrize("dataset", [Endless(), Streamed(), iter([1, 2])])
def test_streams_are_refused(dataset: Any) -> None:
    with pytest.raises(TypeError, match="dataset: expected a map-style data set"):
        ShardedLoader(dataset, 2)


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
from zero_ext.data.loader import BatchPrefetcher
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
from zero_ext.data.loader import BatchPrefetcher
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
