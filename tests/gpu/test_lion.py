"""The device's Lion: bit for bit the CPU's, which the tests of the ops hold to float64."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.helpers import on
from tests.ops.helpers import FLOAT_DTYPES, same_values
from tests.ops.optimizers.test_adam import SEGMENTS
from tests.ops.optimizers.test_lion import ROWS, State, make_state


@pytest.mark.parametrize("param", [None, *FLOAT_DTYPES])
@pytest.mark.parametrize("grad", FLOAT_DTYPES)
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_is_the_cpus(
    device: torch.device,
    generator: torch.Generator,
    moments: torch.dtype,
    grad: torch.dtype,
    param: torch.dtype | None,
) -> None:
    start = make_state(generator, 1013, SEGMENTS, ROWS, moments, grad, param)
    state = State(*[on(device, value) for value in start.arguments()])
    state.step()
    start.step()
    for name in ("master", "exp_avg", "param"):
        found, wanted = getattr(state, name), getattr(start, name)
        assert found is None or same_values(found.cpu(), wanted), name
