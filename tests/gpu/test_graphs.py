"""The fused step inside a CUDA graph: replays see new gradients, hyper-parameters and factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.gpu.helpers import assert_adam, captured, on
from tests.ops.optimizer_steps import ADAM, LION
from zero_ext import ops

MAX_NORM = 0.5
COUNT = 40_009


def clipped_steps(states: Sequence[Any], accumulator: torch.Tensor) -> None:
    """Norm over all states, factor and updates; the host waits for nothing."""
    accumulator.zero_()
    for state in states:
        ops.squared_norm_(state.grad, accumulator)
    norm = ops.squared_norm_value(accumulator).sqrt()
    factor = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
    for state in states:
        state.grad_scale.copy_(factor)
        state.step()


def test_replays_equal_steps_made_one_by_one(device: torch.device, generator: torch.Generator) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.bfloat16)
    start = ADAM.state(generator, COUNT, [(0, COUNT)], [{}], *dtypes)
    state = start.map(lambda value: on(device, value))
    accumulator = torch.zeros(33, dtype=torch.int64, device=device)
    saved = state.clone()
    replay = captured(device, lambda: clipped_steps([state], accumulator))
    # Warming up and capturing have stepped.
    for mine, before in zip(state.arguments(), saved.arguments(), strict=True):
        if mine is not None and before is not None:
            mine.copy_(before)
    own = torch.zeros(33, dtype=torch.int64)
    for step in range(1, 6):
        grad = torch.randn(COUNT, generator=generator).bfloat16()
        for each in (state, start):
            each.grad.copy_(grad)
            each.hyper[0, 0] = 1e-2 / step
            each.hyper[0, 5] = step
        before = start.clone()
        replay()
        clipped_steps([start], own)
        assert torch.equal(state.grad_scale.cpu(), start.grad_scale), step
        assert_adam(state, start, before)
        state.master.copy_(start.master)


def test_a_chain_over_many_units_is_one_graph(device: torch.device, generator: torch.Generator) -> None:
    """As the engine steps them: one norm over all units, one factor, an update for each, here of Lion, whose
    arithmetic is IEEE-exact throughout: bit for bit the CPU's."""
    sizes = [40_009, 7, 1024, 5003]
    dtypes = (torch.float32, torch.bfloat16, torch.bfloat16)
    starts = [LION.state(generator, size, [(0, size)], [{}], *dtypes) for size in sizes]
    states = [start.map(lambda value: on(device, value)) for start in starts]
    saved = [state.clone() for state in states]
    accumulator, own = (torch.zeros(33, dtype=torch.int64, device=device_) for device_ in (device, "cpu"))
    replay = captured(device, lambda: clipped_steps(states, accumulator))
    for state, before in zip(states, saved, strict=True):
        for mine, old in zip(state.arguments(), before.arguments(), strict=True):
            if mine is not None and old is not None:
                mine.copy_(old)
    for step in range(1, 4):
        for state, start in zip(states, starts, strict=True):
            grad = torch.randn(start.grad.numel(), generator=generator).bfloat16()
            for each in (state, start):
                each.grad.copy_(grad)
                each.hyper[0, 0] = 1e-2 / step
        replay()
        clipped_steps(starts, own)
        for state, start in zip(states, starts, strict=True):
            for name in ("master", "exp_avg", "param", "grad_scale"):
                assert torch.equal(getattr(state, name).cpu(), getattr(start, name)), (step, name)


def test_a_factor_that_is_not_finite_skips_the_step(device: torch.device, generator: torch.Generator) -> None:
    state = ADAM.state(generator, 1000, [(0, 1000)], [{}], param=torch.bfloat16)
    state = state.map(lambda value: on(device, value))
    before = state.clone()
    state.grad_scale.fill_(float("inf"))
    state.step()
    assert torch.equal(state.master, before.master)
    assert torch.equal(state.exp_avg, before.exp_avg)
