"""Every sample exactly once an epoch, whatever happens to world and batch size; and what a shuffle is."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_ext.data.sample_stream import EpochOrder, Position, SampleStream

FIXED_FIRST = [8, 1, 4, 9, 2, 3, 0, 6, 7, 5]
FIXED_LAST = [772, 554, 830, 395, 147, 935, 411, 515, 920, 234]
SEEDS = st.integers(-(2**70), 2**70)


@settings(deadline=None)
@given(st.integers(1, 3000), SEEDS, st.integers(0, 10**6))
def test_every_epoch_is_a_permutation(samples: int, seed: int, epoch: int) -> None:
    order = EpochOrder(samples, seed, True)
    assert sorted(order.indices(epoch, 0, samples)) == list(range(samples))


@settings(deadline=None)
@given(st.integers(1, 500), SEEDS, st.integers(0, 9), st.data())
def test_a_range_is_the_slice_of_the_epoch(samples: int, seed: int, epoch: int, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, samples))
    end = data.draw(st.integers(begin, samples))
    order = EpochOrder(samples, seed, True)
    assert order.indices(epoch, begin, end) == order.indices(epoch, 0, samples)[begin:end]


def test_a_billion_samples_need_no_table() -> None:
    positions = EpochOrder(10**9, 1, True).indices(2, 999_999_000, 10**9)
    assert len(set(positions)) == 1000
    assert all(0 <= index < 10**9 for index in positions)


def test_the_order_is_fixed_for_ever() -> None:
    # Checkpoints hold positions in this order: another order would make resumed runs repeat samples.
    assert EpochOrder(10, 0, True).indices(0, 0, 10) == FIXED_FIRST
    assert EpochOrder(1000, 5, True).indices(3, 990, 1000) == FIXED_LAST


def test_seeds_and_epochs_have_different_orders() -> None:
    orders = [EpochOrder(50, seed, True).indices(epoch, 0, 50) for seed in range(20) for epoch in range(20)]
    assert len({tuple(order) for order in orders}) == 400


def test_without_shuffle_the_order_is_the_data_sets_own() -> None:
    assert EpochOrder(7, 3, False).indices(4, 2, 7) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("samples", [2, 3, 4, 5])
def test_all_orders_are_equally_likely(samples: int) -> None:
    kinds = math.factorial(samples)
    draws = 30 * kinds
    seen = Counter(tuple(EpochOrder(samples, 11, True).indices(epoch, 0, samples)) for epoch in range(draws))
    assert len(seen) == kinds
    chi_squared = sum((count - 30) ** 2 / 30 for count in seen.values())
    assert chi_squared < kinds - 1 + 5 * math.sqrt(2 * (kinds - 1))


@pytest.mark.parametrize("samples", [64, 1000, 4097])
def test_neighbors_are_unrelated(samples: int) -> None:
    steps: Counter[int] = Counter()
    for epoch in range(40_000 // samples + 1):
        order = EpochOrder(samples, 4, True).indices(epoch, 0, samples)
        steps.update((after - before) % samples for before, after in pairwise(order))
    assert steps[0] == 0
    bins = Counter((step - 1) * 16 // (samples - 1) for step in steps.elements())
    widths = Counter(step * 16 // (samples - 1) for step in range(samples - 1))
    expected = {index: steps.total() * width / (samples - 1) for index, width in widths.items()}
    chi_squared = sum((bins[index] - expected[index]) ** 2 / expected[index] for index in range(16))
    assert chi_squared < 15 + 5 * math.sqrt(30)


@pytest.mark.parametrize(("begin", "end"), [(-1, 3), (2, 1), (0, 11)])
def test_a_range_outside_the_epoch_is_refused(begin: int, end: int) -> None:
    with pytest.raises(ValueError, match=rf"positions: expected .* 0 to 10, .* got {begin} to {end}"):
        EpochOrder(10, 0, True).indices(0, begin, end)


def deal(stream: SampleStream, position: Position) -> list[int]:
    """What all ranks together get of the global micro-batch at `position`, in rank order."""
    return [index for rank in range(stream.world_size) for index in stream.indices(position, rank)]


segments = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 12)), min_size=1, max_size=8
)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 99), st.booleans(), segments)
def test_changes_of_world_size_repeat_and_skip_nothing(
    samples: int, seed: int, shuffle: bool, segments: list[tuple[int, int, int]]
) -> None:
    order = EpochOrder(samples, seed, shuffle)
    position, consumed = Position(0, 0), list[int]()
    for world_size, micro_batch_size, batches in segments:
        stream = SampleStream(order, micro_batch_size, world_size, drop_last=False)
        position = stream.normalized(*position)
        for _ in range(batches):
            consumed += deal(stream, position)
            position = stream.after(position)
    assert position == (len(consumed) // samples, len(consumed) % samples)
    for epoch in range(len(consumed) // samples + 1):
        of_epoch = consumed[epoch * samples : (epoch + 1) * samples]
        assert of_epoch == order.indices(epoch, 0, samples)[: len(of_epoch)]


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 99), segments)
def test_drop_last_leaves_out_less_than_a_global_batch_and_repeats_nothing(
    samples: int, seed: int, segments: list[tuple[int, int, int]]
) -> None:
    order = EpochOrder(samples, seed, True)
    position = Position(0, 0)
    consumed: dict[int, list[int]] = {}
    largest = 0
    for world_size, micro_batch_size, batches in segments:
        if world_size * micro_batch_size > samples:
            continue
        stream = SampleStream(order, micro_batch_size, world_size, drop_last=True)
        largest = max(largest, stream.global_batch)
        position = stream.normalized(*position)
        for _ in range(batches):
            consumed.setdefault(position.epoch, []).extend(deal(stream, position))
            position = stream.after(position)
    for epoch, indices in consumed.items():
        assert max(Counter(indices).values()) == 1
        if epoch < position.epoch:
            assert samples - len(indices) < largest


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_length_is_the_number_of_batches_from_the_first_sample(
    samples: int, world_size: int, micro_batch_size: int, drop_last: bool
) -> None:
    if drop_last and world_size * micro_batch_size > samples:
        return
    stream = SampleStream(EpochOrder(samples, 0, True), micro_batch_size, world_size, drop_last)
    position, counted = Position(0, 0), 0
    while position.epoch == 0:
        position, counted = stream.after(position), counted + 1
    assert counted == stream.batches
