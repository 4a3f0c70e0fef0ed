"""The device's LAMB and Lion: bit for bit the CPU's, which the tests of the ops hold to float64."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.helpers import on
from tests.ops.helpers import FLOAT_DTYPES, same_values
from tests.ops.optimizer_steps import LAMB, LION, MOMENT_DTYPES, SEGMENTS, StepOp
from zero_ext import ops


@pytest.mark.parametrize("param", [None, *FLOAT_DTYPES])
@pytest.mark.parametrize("grad", FLOAT_DTYPES)
@pytest.mark.parametrize("moments", MOMENT_DTYPES)
@pytest.mark.parametrize("family", [LAMB, LION], ids=lambda family: family.name)
def test_steps_are_the_cpus(
    device: torch.device,
    generator: torch.Generator,
    family: StepOp,
    moments: torch.dtype,
    grad: torch.dtype,
    param: torch.dtype | None,
) -> None:
    start = family.state(generator, 1013, SEGMENTS, family.rows, moments, grad, param)
    state = start.map(lambda value: on(device, value))
    if family is LAMB:
        assert torch.equal(state.norms().cpu(), start.norms())
    state.step()
    start.step()
    for name in (*family.values, "param"):
        found, wanted = getattr(state, name), getattr(start, name)
        assert found is None or same_values(found.cpu(), wanted), name


def test_norms_of_long_segments(device: torch.device, generator: torch.Generator) -> None:
    start = LAMB.state(generator, 700_001, [(5, 123_456), (123_456, 700_000)], LAMB.rows[:2])
    state = start.map(lambda value: on(device, value))
    wanted = start.norms()
    assert torch.equal(state.norms().cpu(), wanted)
    squares = start.master[5:123_456].double().square().sum()
    assert torch.allclose(ops.squared_norm_value(wanted[0, 0]), squares)
