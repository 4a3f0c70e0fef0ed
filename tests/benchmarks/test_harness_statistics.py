"""Ratios, agreement and formulas that the benchmarks' verdicts rest on."""

import math
import random

import pytest

from benchmarks.harness.formula import relative_excess, state_bytes
from benchmarks.harness.process_memory import live_tensor_bytes, status_bytes
from benchmarks.harness.shapes import SHAPES, batch_for, build_model
from benchmarks.harness.statistics import (
    Ratio,
    agree,
    largest_difference,
    mean_over_ranks,
    ratio_of_rounds,
    within,
)


def test_ratio_is_computed_within_rounds() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    peer = [draw.uniform(0.5, 5.0) for _ in range(9)]  # a machine whose speed drifts tenfold
    subject = [0.7 * seconds for seconds in peer]
    ratio = ratio_of_rounds(subject, peer)
    assert ratio.median == pytest.approx(0.7)
    assert ratio.high - ratio.low < 1e-9
    assert ratio.rounds == 9


def test_one_slow_round_does_not_move_the_median() -> None:
    ratio = ratio_of_rounds([1.0, 1.0, 9.0, *[1.0] * 6], [2.0] * 9)
    assert (ratio.median, ratio.low, ratio.high, ratio.rounds) == (0.5, 0.5, 0.5, 9)


@pytest.mark.parametrize("count", [3, 5, 7, 9, 21])  # of others a tail is close to 2.5%
def test_the_interval_is_that_of_the_exact_bootstrap(count: int) -> None:
    """The median of n resampled values is at most the k-th smallest if more than half of them are, which is a
    tail of the binomial distribution with p = k / n."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    values = sorted(draw.uniform(0.5, 1.5) for _ in range(count))
    draw.shuffle(shuffled := list(values))
    middle = count // 2 + 1

    def at_most(rank: int) -> float:
        chosen = range(middle, count + 1)
        share = rank / count
        return sum(math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in chosen)

    low = next(rank for rank in range(1, count + 1) if at_most(rank) >= 0.025)
    found = ratio_of_rounds(shuffled, [1.0] * count)
    assert (found.low, found.high) == pytest.approx((values[low - 1], values[count - low]))
    assert found == ratio_of_rounds(shuffled, [1.0] * count)
    assert not found.at_most(found.median) and found.at_most(found.high)
    assert not found.at_least(found.median) and found.at_least(found.low)


def test_an_interval_as_text() -> None:
    assert Ratio(0.5, 0.25, 1.0, 9).text() == "0.50 (0.25–1.00)"
    assert Ratio(2.0, 1.0, 3.0, 9).text(1, "x") == "2.0x (1.0–3.0)"


@pytest.mark.parametrize(("subject", "peer"), [([1.0], [1.0, 2.0]), ([], []), ([1.0], [0.0])])
def test_rounds_that_do_not_pair_are_refused(subject: list[float], peer: list[float]) -> None:
    with pytest.raises(ValueError):
        ratio_of_rounds(subject, peer)


def test_losses_agree_to_bfloat16_only() -> None:
    reference = [9.0, 8.5, 8.0]
    assert agree([9.0, 8.5, 8.0 * (1 + 2.0**-8)], reference)
    assert not agree([9.0, 8.5, 8.0 * (1 + 2.0**-6)], reference)
    assert agree([9.0, 8.5], reference)
    assert not agree([9.0, math.nan, 8.0], reference)
    assert math.isnan(largest_difference([math.nan], [1.0]))
    with pytest.raises(ValueError):
        agree([], reference)


def test_bars() -> None:
    assert [within(0.7, 0.7), within(0.701, 0.7), within(5.0, None)] == ["yes", "no", ""]


def test_losses_are_averaged_over_ranks() -> None:
    assert mean_over_ranks([[1.0, 2.0], [3.0, 6.0]]) == [2.0, 4.0]


def test_formula_equals_the_published_example() -> None:
    gigabytes = [sum(state_bytes(7_500_000_000, stage, 64).values()) / 1e9 for stage in range(4)]
    assert gigabytes == pytest.approx([120.0, 31.4, 16.6, 1.88], rel=3e-3)
    with pytest.raises(ValueError, match="stage"):
        state_bytes(1, 4, 1)
    assert relative_excess(103.0, 100.0) == pytest.approx(0.03)


@pytest.mark.parametrize("name", ["tiny", "34m"])
def test_shapes_count_their_parameters(name: str) -> None:
    shape = SHAPES[name]
    assert sum(parameter.numel() for parameter in build_model(shape).parameters()) == shape.parameters


def test_batches_differ_by_rank_and_repeat() -> None:
    shape = SHAPES["tiny"]
    first = batch_for(shape, rank=0, step=1)
    assert first.equal(batch_for(shape, rank=0, step=5))
    assert not first.equal(batch_for(shape, rank=1, step=1))
    assert not first.equal(batch_for(shape, rank=0, step=2))


def test_status_fields_are_kibibytes() -> None:
    assert status_bytes("VmRSS", "Name:\tx\nVmRSS:\t  12 kB\n") == 12 * 1024
    with pytest.raises(RuntimeError, match="VmHWM"):
        status_bytes("VmHWM", "Name:\tx\n")


def test_live_tensors_count_a_storage_once() -> None:
    import torch

    before = live_tensor_bytes()
    tensor = torch.ones(1 << 20)
    views = [tensor[:10], tensor.view(2, -1)]
    assert live_tensor_bytes() - before == tensor.nbytes
    tensor.grad = torch.ones(1 << 20)
    assert live_tensor_bytes() - before == 2 * tensor.nbytes
    assert len(views) == 2
