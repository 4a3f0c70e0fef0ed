"""Values that kernels cannot use: recorded on the device, harmless, raised later, and CUDA goes on.

The CPU's ops raise theirs immediately, in words of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from tests.gpu.helpers import captured, on
from zero_ext import ops

ADAM = [1e-3, 0.9, 0.999, 1e-8, 0.1, 1.0, 1.0, 0.0]


def expect_error(device: torch.device, call: Callable[[], object], text: str) -> None:
    """The call is refused: by an error on the CPU, by a record on another device, which is raised once."""
    if device.type == "cpu":
        with pytest.raises(RuntimeError):
            call()
        return
    ops.raise_device_errors(device)
    call()
    with pytest.raises(RuntimeError, match=re.escape(f"{device}: {text}")):
        ops.raise_device_errors(device)
    ops.raise_device_errors(device)


def test_negative_values_of_the_unsigned_code_read_as_nan(device: torch.device) -> None:
    values = torch.rand(5000)
    values[4097] = -0.25
    moved = values.to(device)

    def quantize() -> None:
        quantized = ops.quantize_blockwise(moved, False)
        read = ops.dequantize_blockwise(quantized, False).cpu()
        assert read.isnan().nonzero().flatten().tolist() == list(range(4096, 4352))

    said = "quantize_blockwise: entry of values[4097]: expected 0 or more for the unsigned code, got -0.25."
    expect_error(device, quantize, said)


def test_a_negative_sum_reads_as_nan(device: torch.device) -> None:
    accumulator = torch.zeros(ops.ACCUMULATOR_ENTRIES, dtype=torch.int64)
    accumulator[31] = -4
    moved = accumulator.to(device)

    def read() -> None:
        assert bool(ops.squared_norm_value(moved).isnan())

    said = "squared_norm_value: entry of accumulator[31]: expected 0 or more in a sum of squares, got -4."
    expect_error(device, read, said)


@pytest.mark.parametrize(("which", "position", "value"), [("columns", 1, 9), ("row_pointers", 1, 700)])
def test_a_bad_layout_returns_zeros(device: torch.device, which: str, position: int, value: int) -> None:
    lists = {
        "row_pointers": torch.tensor([[0, 2, 4]], dtype=torch.int32),
        "columns": torch.tensor([0, 1, 0, 1], dtype=torch.int32),
    }
    lists[which].view(-1)[position] = value
    inputs = [torch.randn(1, 2, 64, 32).to(device) for _ in range(3)]
    layout = [each.to(device) for each in lists.values()]

    def attend() -> None:
        found = ops.block_sparse_attention(*inputs, *layout, block=32)
        assert not found.any()

    wanted = {
        "columns": "a block of the layout, above the one",
        "row_pointers": "an offset into the blocks, not below the one",
    }
    said = f"entry of {which}[{position}]: expected {wanted[which]} before"
    expect_error(device, attend, f"block_sparse_attention_forward: {said}")


def test_a_captured_step_with_bad_settings_changes_nothing_until_they_are_good(
    device: torch.device, generator: torch.Generator
) -> None:
    start = [torch.randn(3000, generator=generator).square() for _ in range(4)]
    state = [on(device, each) for each in start]
    hyper = torch.tensor([ADAM, ADAM], dtype=torch.float64, device=device)
    segments = torch.tensor([[0, 1000], [1000, 3000]], device=device)
    scale = torch.ones((), device=device)
    replay = captured(device, lambda: ops.adam_step_(*state, None, segments, hyper, scale))
    for mine, before in zip(state, start, strict=True):
        mine.copy_(before)
    hyper[1, 2] = 1.25
    expect_error(device, replay, "adam_step_: beta2 of hyper[1]: expected in [0, 1), got 1.25.")
    assert all(torch.equal(mine.cpu(), before) for mine, before in zip(state, start, strict=True))
    hyper[1, 2] = 0.9
    replay()
    assert not torch.equal(state[0].cpu()[:1000], start[0][:1000])
    assert not torch.equal(state[0].cpu()[1000:], start[0][1000:])
    ops.raise_device_errors(device)
