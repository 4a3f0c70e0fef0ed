"""The device's Adam against a float64 reference, and against the CPU's as exactly as it can be."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.helpers import assert_adam, on
from tests.ops.helpers import FLOAT_DTYPES
from tests.ops.optimizer_steps import ADAM, MOMENT_DTYPES, SEGMENTS, State, assert_near, reference


def moved(state: State, device: torch.device) -> State:
    """The state on the device."""
    return state.map(lambda value: on(device, value))


@pytest.mark.parametrize("param", [None, *FLOAT_DTYPES])
@pytest.mark.parametrize("grad", FLOAT_DTYPES)
@pytest.mark.parametrize("moments", MOMENT_DTYPES)
def test_matches_float64_and_the_cpu(
    device: torch.device,
    generator: torch.Generator,
    moments: torch.dtype,
    grad: torch.dtype,
    param: torch.dtype | None,
) -> None:
    start = ADAM.state(generator, 1013, SEGMENTS, ADAM.rows, moments, grad, param)
    wanted = reference(start).values
    state, twin = moved(start, device), start.clone()
    state.step()
    twin.step()
    for name in ADAM.values:
        assert_near(getattr(state, name).cpu(), wanted[name], name)
    assert_adam(state, twin, start)


@pytest.mark.parametrize("shift", [0, 1, 13])
def test_long_ranges_of_any_alignment(device: torch.device, generator: torch.Generator, shift: int) -> None:
    count = 2**21 + 77
    ranges = [(1, 5), (9, count)]
    start = ADAM.state(generator, count, ranges, [{}, {}], grad=torch.bfloat16)
    start.param = torch.full((count,), -7.0, dtype=torch.bfloat16)
    before, state = start.clone(), moved(start, device)
    memory = torch.full((shift + count + 64,), -7.0, dtype=torch.bfloat16, device=device)
    state.param = memory[shift : shift + count]
    state.step()
    start.step()
    assert_adam(state, start, before)
    assert bool((memory[:shift] == -7).all()) and bool((memory[shift + count :] == -7).all())


def test_each_of_a_hundred_steps_is_the_cpus(device: torch.device, generator: torch.Generator) -> None:
    start = ADAM.state(generator, 5003, [(0, 5003)], [{"lr": 1e-3}], grad=torch.bfloat16)
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
    state = moved(ADAM.state(generator, 8, [(0, 8)], [{}]), device)
    state.grad = state.grad.to("meta")
    with pytest.raises(RuntimeError, match="expected all tensors on one device"):
        state.step()
