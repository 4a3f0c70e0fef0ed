"""Flags about values that are not finite on the device: as on the CPU, at every place and alignment."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.helpers import on
from tests.ops.flat.test_non_finite import BAD, adam, adam_8bit, lamb, lion
from tests.ops.helpers import FLOAT_DTYPES
from zero_ext import ops


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_one_element_raises_the_flag(
    device: torch.device, generator: torch.Generator, dtype: torch.dtype
) -> None:
    for count in (1, 9, 4099, 300_007):
        for shift in (0, 1, 3):
            values = torch.randn(count + shift, generator=generator).to(device, dtype)[shift:]
            flag = torch.zeros(1, dtype=torch.int32, device=device)
            ops.flag_non_finite_(values, flag)
            assert flag.tolist() == [0]
            position = int(torch.randint(0, count, (1,), generator=generator))
            values[position] = BAD[count % 3]
            ops.flag_non_finite_(values, flag)
            assert flag.tolist() == [1], (count, shift, position)


@pytest.mark.parametrize("step", [adam, adam_8bit, lion, lamb])
def test_a_step_raises_the_flag(device: torch.device, generator: torch.Generator, step: object) -> None:
    segments, scale = torch.tensor([[2, 300], [301, 700]]), torch.tensor(0.5)
    for position, inside in ((0, False), (2, True), (300, False), (699, True)):
        for value in (0.5, *BAD):
            buffers = [torch.randn(700, generator=generator).square() for _ in range(4)]
            buffers[3][position] = value
            flag = torch.zeros(1, dtype=torch.int32, device=device)
            moved = [on(device, each) for each in (*buffers, segments, scale)]
            step(moved[:4], *moved[4:], flag)  # type: ignore[operator]
            assert bool(flag) == (inside and value != 0.5), (position, value)
