"""Block-wise 8-bit state on the device: bit for bit the CPU's, which the tests of the ops hold to float64."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.helpers import assert_adam, on
from tests.ops.helpers import FLOAT_DTYPES, same_values
from tests.ops.optimizer_steps import ADAM_8BIT
from zero_ext import ops


@pytest.mark.parametrize("param", [None, torch.bfloat16])
@pytest.mark.parametrize("grad", FLOAT_DTYPES)
def test_adam_is_the_cpus(
    device: torch.device, generator: torch.Generator, grad: torch.dtype, param: torch.dtype | None
) -> None:
    start = ADAM_8BIT.state(generator, 1413, grad=grad, param=param)
    state = start.map(lambda value: on(device, value))
    before = start.clone()
    state.step()
    start.step()
    assert_adam(state, start, before)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("count", [1, 255, 256, 257, 70_001])
def test_quantized_values_are_the_cpus(
    device: torch.device, generator: torch.Generator, count: int, signed: bool
) -> None:
    values = torch.randn(count, generator=generator) * torch.rand(count, generator=generator) ** 8
    values = values if signed else values.abs()
    wanted = ops.quantize_blockwise(values, signed)
    found = ops.quantize_blockwise(values.to(device), signed)
    assert torch.equal(found.codes.cpu(), wanted.codes)
    assert same_values(found.scales.cpu(), wanted.scales)
    back = ops.dequantize_blockwise(found, signed).cpu()
    assert same_values(back, ops.dequantize_blockwise(wanted, signed))
