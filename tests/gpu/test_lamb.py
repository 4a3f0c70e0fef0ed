"""The device's LAMB: bit for bit the CPU's, which the tests of the ops hold to float64."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.helpers import on
from tests.ops.helpers import FLOAT_DTYPES, same_values
from tests.ops.optimizers.test_adam import SEGMENTS
from tests.ops.optimizers.test_lamb import ROWS, State, make_state
from zero_ext import ops


@pytest.mark.parametrize("param", [None, *FLOAT_DTYPES])
@pytest.mark.parametrize("grad", FLOAT_DTYPES)
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_lamb_is_the_cpus(
    device: torch.device,
    generator: torch.Generator,
    moments: torch.dtype,
    grad: torch.dtype,
    param: torch.dtype | None,
) -> None:
    start = make_state(generator, 1013, SEGMENTS, ROWS, moments, grad, param)
    state = State(*[on(device, value) for value in start.arguments()])
    assert torch.equal(norms_of(state).cpu(), norms_of(start))
    state.step()
    start.step()
    for name in ("master", "exp_avg", "exp_avg_sq", "param"):
        found, wanted = getattr(state, name), getattr(start, name)
        assert found is None or same_values(found.cpu(), wanted), name


def test_norms_of_long_segments(device: torch.device, generator: torch.Generator) -> None:
    start = make_state(generator, 700_001, [(5, 123_456), (123_456, 700_000)], ROWS[:2])
    state = State(*[on(device, value) for value in start.arguments()])
    wanted = norms_of(start)
    assert torch.equal(norms_of(state).cpu(), wanted)
    squares = start.master[5:123_456].double().square().sum()
    assert torch.allclose(ops.squared_norm_value(wanted[0, 0]), squares)


def norms_of(state: State) -> torch.Tensor:
    """The sums of squares of one call, on the state's device."""
    norms = torch.zeros(state.segments.shape[0], 2, 33, dtype=torch.int64, device=state.master.device)
    state.add_norms(norms)
    return norms
