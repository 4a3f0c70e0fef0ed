"""The shuffle against what a shuffle is: a bijection, uniform, and fixed by seed and epoch alone."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_ext.data.shuffle import EpochOrder

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
