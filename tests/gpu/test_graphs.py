"""The fused step inside a CUDA graph: replays see new gradients, hyper-parameters and factors."""

from __future__ import annotations

import torch

from tests.gpu.helpers import captured, on
from tests.ops import test_adam as cpu
from tests.ops.test_adam import Hyper, State
from zero_ext import ops

MAX_NORM = 0.5
COUNT = 40_009


def clipped_step(state: State, accumulator: torch.Tensor) -> None:
    """Norm, factor and update; the host waits for nothing."""
    accumulator.zero_()
    ops.squared_norm_(state.grad, accumulator)
    norm = ops.squared_norm_value(accumulator).sqrt()
    state.grad_scale.copy_((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
    state.step()


def test_replays_equal_steps_made_one_by_one(device: torch.device, generator: torch.Generator) -> None:
    start = cpu.make_state(
        generator, COUNT, [(0, COUNT)], [Hyper()], torch.float32, torch.bfloat16, torch.bfloat16
    )
    state = State(*[on(device, value) for value in start.arguments()])
    accumulator = torch.zeros(33, dtype=torch.int64, device=device)
    saved = state.clone()
    replay = captured(device, lambda: clipped_step(state, accumulator))
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
        replay()
        clipped_step(start, own)
        assert torch.equal(state.master.cpu(), start.master), step
        assert state.param is not None and start.param is not None
        assert torch.equal(state.param.cpu(), start.param), step


def test_a_factor_that_is_not_finite_skips_the_step_on_a_gpu(
    device: torch.device, generator: torch.Generator
) -> None:
    state = cpu.make_state(generator, 1000, [(0, 1000)], [Hyper()], param=torch.bfloat16)
    state = State(*[on(device, value) for value in state.arguments()])
    before = state.clone()
    state.grad_scale.fill_(float("inf"))
    if device.type == "cuda":
        state.step()
        torch.cuda.synchronize()
        assert torch.equal(state.master, before.master)
        assert torch.equal(state.exp_avg, before.exp_avg)
