"""The device's Adam against a float64 reference, and against the CPU's as exactly as it can be."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.helpers import assert_adam, on
from tests.ops.helpers import FLOAT_DTYPES
from tests.ops.optimizers import test_adam as cpu
from tests.ops.optimizers.test_adam import ROWS, SEGMENTS, Hyper, State


def moved(state: State, device: torch.device) -> State:
    """The state on the device."""
    return State(*[on(device, value) for value in state.arguments()])


@pytest.mark.parametrize("param", [None, *FLOAT_DTYPES])
@pytest.mark.parametrize("grad", FLOAT_DTYPES)
@pytest.mark.parametrize("moments", cpu.MOMENT_DTYPES)
def test_matches_float64_and_the_cpu(
    device: torch.device,
    generator: torch.Generator,
    moments: torch.dtype,
    grad: torch.dtype,
    param: torch.dtype | None,
) -> None:
    start = cpu.make_state(generator, 1013, SEGMENTS, ROWS, moments, grad, param)
    master, exp_avg, exp_avg_sq = cpu.reference(start)
    state, twin = moved(start, device), start.clone()
    state.step()
    twin.step()
    cpu.assert_near(state.master.cpu(), master, "master")
    cpu.assert_near(state.exp_avg.cpu(), exp_avg, "exp_avg")
    cpu.assert_near(state.exp_avg_sq.cpu(), exp_avg_sq, "exp_avg_sq")
    assert_adam(state, twin, start)


@pytest.mark.parametrize("shift", [0, 1, 13])
def test_long_ranges_of_any_alignment(device: torch.device, generator: torch.Generator, shift: int) -> None:
    count = 2**21 + 77
    ranges = [(1, 5), (9, count)]
    start = cpu.make_state(generator, count, ranges, [Hyper(), Hyper()], grad=torch.bfloat16)
    start.param = torch.full((count,), -7.0, dtype=torch.bfloat16)
    before, state = start.clone(), moved(start, device)
    memory = torch.full((shift + count + 64,), -7.0, dtype=torch.bfloat16, device=device)
    state.param = memory[shift : shift + count]
    state.step()
    start.step()
    assert_adam(state, start, before)
    assert bool((memory[:shift] == -7).all()) and bool((memory[shift + count :] == -7).all())


def test_each_of_a_hundred_steps_is_the_cpus(device: torch.device, generator: torch.Generator) -> None:
    start = cpu.make_state(generator, 5003, [(0, 5003)], [Hyper(lr=1e-3)], grad=torch.bfloat16)
    state = moved(start, device)
    for step in range(1, 101):
        grad, before = torch.randn(5003, generator=generator).bfloat16(), start.clone()
        for each in (state, start):
            each.grad = grad.to(each.master.device)
            each.hyper[0, 5] = step
            each.step()
        assert_adam(state, start, before)
        state.master.copy_(start.master)  # moments go on by themselves


def test_tensors_of_two_devices_are_refused(device: torch.device, generator: torch.Generator) -> None:
    state = moved(cpu.make_state(generator, 8, [(0, 8)], [Hyper()]), device)
    state.grad = state.grad.to("meta")
    with pytest.raises(RuntimeError, match="expected all tensors on one device"):
        state.step()
