"""squared_norm_ is exact: checked against rational arithmetic, in every order and split."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from tests.ops.helpers import FLOAT_DTYPES, random_bits
from zero_ext import ops

GRID = Fraction(1, 2**298)


def exact_sum(values: Tensor) -> Fraction:
    """Sum of squares of the finite values, as a fraction."""
    return sum((Fraction(x) ** 2 for x in values.double().tolist() if math.isfinite(x)), Fraction(0))


def held_sum(accumulator: Tensor) -> Fraction:
    """What the limbs of an accumulator stand for."""
    return sum(limb * 2 ** (20 * i) for i, limb in enumerate(accumulator[:32].tolist())) * GRID


def accumulate(*slices: Tensor) -> Tensor:
    accumulator = torch.zeros(33, dtype=torch.int64)
    for values in slices:
        ops.squared_norm_(values, accumulator)
    return accumulator


def finite_bits(count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    values = random_bits(count, dtype, generator)
    return torch.where(values.isfinite(), values, torch.zeros((), dtype=dtype))


def normal(count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return (torch.randn(count, generator=generator) * 1e-3).to(dtype)


def subnormal(count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    smallest = torch.finfo(dtype).smallest_normal
    return (torch.rand(count, generator=generator, dtype=torch.float64) * smallest).to(dtype)


def wide(decades: int) -> Callable[[int, torch.dtype, torch.Generator], Tensor]:
    """Normal values times random powers of two up to 2^-decades: one to four accumulators, or none."""

    def make(count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        exponents = torch.randint(0, decades, (count,), generator=generator)
        return torch.ldexp(torch.randn(count, generator=generator), -exponents).to(dtype)

    make.__name__ = f"wide{decades}"
    return make


def sparse(count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    keep = torch.rand(count, generator=generator) < 0.01
    return normal(count, dtype, generator) * keep


def largest(count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.full((count,), torch.finfo(dtype).max, dtype=dtype)


def repeated(count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """In every run of 1024 one value repeated, so that roundings add up, and one far smaller value."""
    runs = []
    for start in range(0, count, 1024):
        run = torch.full((min(1024, count - start),), 1 + torch.rand((), generator=generator).item())
        distance = int(torch.randint(0, 60, (), generator=generator))
        run[0] = (1 + torch.rand((), generator=generator).item()) * 2.0**-distance
        runs.append(run)
    return torch.cat(runs).to(dtype)


KINDS = [
    repeated,
    normal,
    finite_bits,
    subnormal,
    sparse,
    largest,
    wide(6),
    wide(14),
    wide(30),
    wide(50),
    wide(120),
]


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_exact(
    isa: str,
    generator: torch.Generator,
    dtype: torch.dtype,
    make: Callable[[int, torch.dtype, torch.Generator], Tensor],
) -> None:
    values = make((40 if make is repeated else 3) * 1024 + 29, dtype, generator)
    accumulator = accumulate(values)
    wanted = exact_sum(values)
    assert held_sum(accumulator) == wanted
    assert accumulator[32] == 0
    assert ops.squared_norm_value(accumulator).item() == float(wanted)
    assert float(wanted) == math.fsum(x * x for x in values.double().tolist())
    assert accumulator[:31].min() >= 0 and accumulator[:31].max() < 2**20


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_order_and_split_do_not_matter(generator: torch.Generator, dtype: torch.dtype) -> None:
    values = torch.cat([normal(4000, dtype, generator), finite_bits(500, dtype, generator)])
    wanted = accumulate(values)
    assert held_sum(wanted) == exact_sum(values)
    for _ in range(20):
        order = torch.randperm(len(values), generator=generator)
        cut_count = int(torch.randint(1, 12, (), generator=generator))
        cuts = torch.randint(0, len(values), (cut_count,), generator=generator).sort().values.tolist()
        slices = [values[order][a:b] for a, b in zip([0, *cuts], [*cuts, len(values)], strict=True)]
        assert torch.equal(accumulate(*slices), wanted)


def test_thread_count_and_instruction_set_do_not_matter(isa: str, generator: torch.Generator) -> None:
    values = torch.randn(300_007, generator=generator)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(accumulate(values))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    squares = values.double().square().tolist()
    assert ops.squared_norm_value(results[0]).item() == math.fsum(squares)


def test_flushed_subnormals_are_still_counted(generator: torch.Generator) -> None:
    values = subnormal(2000, torch.float32, generator)
    wanted = exact_sum(values)
    if not torch.set_flush_denormal(True):
        pytest.fail("this machine cannot flush subnormals, so the test shows nothing")
    try:
        accumulator = accumulate(values)
    finally:
        torch.set_flush_denormal(False)
    assert wanted > 0
    assert held_sum(accumulator) == wanted


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_non_finite_elements_are_counted_and_add_nothing(
    isa: str, generator: torch.Generator, dtype: torch.dtype
) -> None:
    values = normal(5000, dtype, generator)
    positions = torch.randperm(5000, generator=generator)[:7]
    values[positions] = torch.tensor([math.inf, -math.inf, math.nan] * 2 + [math.nan], dtype=dtype)
    accumulator = accumulate(values)
    assert accumulator[32] == 7
    assert held_sum(accumulator) == exact_sum(values)
    assert math.isnan(ops.squared_norm_value(accumulator).item())


def test_accumulators_of_many_ranks_add_up() -> None:
    values = torch.full((4096,), torch.finfo(torch.float32).max)
    accumulator = accumulate(values, values)
    ranks = 65_536
    assert held_sum(accumulator * ranks) == ranks * 2 * exact_sum(values)
    assert ops.squared_norm_value(accumulator * ranks).item() == float(ranks * 2 * exact_sum(values))


def test_value_rounds_to_nearest_even(generator: torch.Generator) -> None:
    for _ in range(300):
        accumulator = torch.zeros(33, dtype=torch.int64)
        width = int(torch.randint(1, 33, (), generator=generator))
        accumulator[:width] = torch.randint(0, 2**36, (width,), generator=generator)
        assert ops.squared_norm_value(accumulator).item() == float(held_sum(accumulator))
    for extra, lowest in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        # 2^53 + extra, then half a unit in the last place, then perhaps one more grain.
        accumulator = torch.zeros(33, dtype=torch.int64)
        accumulator[10] = 1 << 13
        accumulator[8] += extra
        accumulator[7] += 1 << 19
        accumulator[0] += lowest
        assert ops.squared_norm_value(accumulator).item() == float(held_sum(accumulator))


def test_empty_and_zero() -> None:
    assert ops.squared_norm_value(accumulate(torch.zeros(0), torch.zeros(1000))).item() == 0.0


def test_refuses_wrong_arguments_by_name() -> None:
    good, accumulator = torch.ones(8), torch.zeros(33, dtype=torch.int64)
    cases = [
        (torch.ones(8, dtype=torch.float64), accumulator, "'grad': expected dtype .*, got Double"),
        (torch.ones(8, dtype=torch.int32), accumulator, "'grad': expected dtype .*, got Int"),
        (torch.ones(16)[::2], accumulator, "'grad'.*expected a contiguous tensor"),
        (torch.ones(2, 4), accumulator, "'grad': .*got shape"),
        (good, torch.zeros(32, dtype=torch.int64), "'accumulator': .*got shape"),
        (good, torch.zeros(33, dtype=torch.float64), "'accumulator': expected dtype .*, got Double"),
        (good, torch.zeros(66, dtype=torch.int64)[::2], "'accumulator'.*expected a contiguous tensor"),
    ]
    for grad, target, message in cases:
        with pytest.raises(RuntimeError, match=f"squared_norm_: argument {message}"):
            ops.squared_norm_(grad, target)
        assert not target.any()
    memory = torch.zeros(33, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="expected its own memory"):
        ops.squared_norm_(memory.view(torch.float32), memory)
    with pytest.raises(RuntimeError, match=r"squared_norm_value: argument 'accumulator': .*got shape"):
        ops.squared_norm_value(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="got a negative one"):
        ops.squared_norm_value(torch.full((33,), -1).index_fill_(0, torch.tensor([32]), 0))
