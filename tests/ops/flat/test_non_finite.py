"""flag_non_finite_ against torch.isfinite, the flags of all optimizer steps, and bad input."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.ops.helpers import BITS, FLOAT_DTYPES, random_bits
from zero_ext import ops

BAD = (float("nan"), float("inf"), -float("inf"))


def flag() -> Tensor:
    return torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_the_flag_says_what_isfinite_says(isa: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    for count in (0, 1, 7, 31, 64, 1000, 300_007):
        for bits in (True, False):
            values = random_bits(count, dtype, generator) if bits else torch.randn(count).to(dtype)
            found = flag()
            ops.flag_non_finite_(values, found)
            assert bool(found) == (not values.isfinite().all()), (count, bits)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("value", BAD)
def test_one_element_at_every_position(isa: str, dtype: torch.dtype, value: float) -> None:
    largest = torch.finfo(dtype).max
    for count in (1, 37, 150):
        for position in range(count):
            values, found = torch.full((count,), -largest, dtype=dtype), flag()
            ops.flag_non_finite_(values, found)
            assert not found
            values[position] = value
            ops.flag_non_finite_(values, found)
            assert found.tolist() == [1]
            ops.flag_non_finite_(torch.zeros(3, dtype=dtype), found)
            assert found.tolist() == [1], "finite values lowered the flag"


def adam_row(lr: float = 1e-2, eps: float = 1e-8) -> list[float]:
    return [lr, 0.9, 0.999, eps, 0.1, 3, 1, 0]


Step = Callable[[Sequence[Tensor], Tensor, Tensor, Tensor], None]  # master, moments, grad; settings; flag


def adam(buffers: Sequence[Tensor], segments: Tensor, scale: Tensor, found: Tensor) -> None:
    hyper = torch.tensor([adam_row()] * 2, dtype=torch.float64, device=scale.device)
    ops.adam_step_(*buffers, torch.empty_like(buffers[0]), segments, hyper, scale, found)


def adam_8bit(buffers: Sequence[Tensor], segments: Tensor, scale: Tensor, found: Tensor) -> None:
    master, exp_avg, exp_avg_sq, grad = buffers
    hyper = torch.tensor([adam_row()] * 2, dtype=torch.float64, device=scale.device)
    moments = [ops.quantize_blockwise(exp_avg, True), ops.quantize_blockwise(exp_avg_sq, False)]
    quantized = [ops.Quantized(*moment) for moment in moments]
    ops.adam_step_8bit_(master, *quantized, grad, None, segments, hyper, scale, found)


def lion(buffers: Sequence[Tensor], segments: Tensor, scale: Tensor, found: Tensor) -> None:
    master, exp_avg, _, grad = buffers
    hyper = torch.tensor([[1e-3, 0.9, 0.99, 0.1, 0]] * 2, dtype=torch.float64, device=scale.device)
    ops.lion_step_(master, exp_avg, grad, None, segments, hyper, scale, found)


def lamb(buffers: Sequence[Tensor], segments: Tensor, scale: Tensor, found: Tensor) -> None:
    hyper = torch.tensor(
        [[1e-3, 0.9, 0.99, 1e-8, 0.1, 0.1, 0.01, 0, 0, 1]] * 2, dtype=torch.float64, device=scale.device
    )
    ops.lamb_step_(*buffers, None, segments, hyper, scale, found)


@pytest.mark.parametrize("step", [adam, adam_8bit, lion, lamb])
@pytest.mark.parametrize("grad", FLOAT_DTYPES)
def test_a_step_raises_the_flag_for_what_it_writes(
    isa: str, step: Step, grad: torch.dtype, generator: torch.Generator
) -> None:
    segments, scale = torch.tensor([[2, 300], [301, 700]]), torch.tensor(0.5)
    for position, inside in ((0, False), (2, True), (299, True), (300, False), (301, True), (699, True)):
        for which in (0, 3):  # the weight, or the gradient
            for value in (0.5, *BAD):
                buffers = [torch.randn(700, generator=generator) for _ in range(4)]
                buffers[2] = buffers[2].square()
                buffers[3] = buffers[3].to(grad)
                buffers[which][position] = value
                found = flag()
                step(buffers, segments, scale, found)
                assert bool(found) == (inside and value != 0.5), (position, which, value)


def test_a_step_that_is_skipped_raises_nothing() -> None:
    buffers = [torch.full((9,), float("nan")) for _ in range(4)]
    found = flag()
    adam(buffers, torch.tensor([[0, 4], [4, 9]]), torch.tensor(float("inf")), found)
    assert not found


def test_bad_arguments_are_named_and_change_nothing() -> None:
    values = torch.rand(8)
    for wrong, message in (
        (torch.zeros(1, dtype=torch.int64), "'non_finite': expected dtype Int, got Long"),
        (torch.zeros(2, dtype=torch.int32), "'non_finite'"),
        (torch.zeros((), dtype=torch.int32), "'non_finite'"),
    ):
        with pytest.raises(RuntimeError, match=f"flag_non_finite_: .*{message}"):
            ops.flag_non_finite_(values, wrong)
        buffers = [torch.rand(8) for _ in range(4)]
        before = [each.clone() for each in buffers]
        with pytest.raises(RuntimeError, match=f"adam_step_: .*{message}"):
            adam(buffers, torch.tensor([[0, 4], [4, 8]]), torch.tensor(1.0), wrong)
        assert all(map(torch.equal, buffers, before))
    with pytest.raises(
        RuntimeError, match=r"flag_non_finite_: argument 'values': expected dtype .*, got Double"
    ):
        ops.flag_non_finite_(torch.zeros(3, dtype=torch.float64), flag())
    with pytest.raises(RuntimeError, match="flag_non_finite_: argument 'values'"):
        ops.flag_non_finite_(torch.zeros(3, 2), flag())
    memory = torch.zeros(4)
    with pytest.raises(RuntimeError, match="overlap"):
        ops.flag_non_finite_(memory, memory.view(BITS[torch.float32])[1:2])
