"""Block-wise quantization against the code's definition in float64, and on bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.blockwise_reference import allowed_error, code_values, decode, encode_scales
from tests.ops.helpers import assert_same_on_all_isas_and_threads
from zero_ext import ops


def spread(count: int, signed: bool, generator: torch.Generator) -> Tensor:
    """Magnitudes over nine decades below 100, exact zeros among them."""
    values = 10 ** (2 - 9 * torch.rand(count, generator=generator))
    values[torch.rand(count, generator=generator) < 0.05] = 0
    if signed:
        values *= torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    return values


@pytest.mark.parametrize("signed", [True, False])
def test_codes_follow_the_published_construction(isa: str, signed: bool) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = ops.dequantize_blockwise(ops.Quantized(codes, torch.ones(1)), signed)
    wanted = code_values(signed)
    assert len(wanted) == 256 and wanted[255] == 1 and (wanted == 0).sum() == 1
    np.testing.assert_allclose(values.double().numpy(), wanted, rtol=1.2e-7, atol=0)
    assert torch.equal(ops.quantize_blockwise(values, signed).codes, codes)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 40_003])
def test_error_is_within_half_the_gap_of_neighboring_codes(
    isa: str, generator: torch.Generator, signed: bool, count: int
) -> None:
    values = spread(count, signed, generator)
    quantized = ops.quantize_blockwise(values, signed)
    exact = values.double().numpy()
    scales = quantized.scales.double().numpy()
    assert quantized.codes.dtype == torch.uint8 and quantized.codes.shape == (count,)
    np.testing.assert_array_equal(scales, encode_scales(exact))
    back = ops.dequantize_blockwise(quantized, signed).double().numpy()
    np.testing.assert_allclose(back, decode(quantized.codes.numpy(), scales, signed), rtol=2.5e-7, atol=0)
    assert (np.abs(back - exact) <= allowed_error(exact, scales, signed)).all()


def test_a_positive_second_moment_never_becomes_zero(isa: str) -> None:
    values = torch.tensor([1.0, 1e-8, 1e-20, 1e-38, 0.0])
    quantized = ops.quantize_blockwise(values, signed=False)
    assert quantized.codes.tolist() == [255, 1, 1, 1, 0]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("largest", [1e-37, 1e-20, 1.0, 3e38])
def test_what_was_quantized_once_is_not_changed_by_quantizing_again(
    isa: str, generator: torch.Generator, signed: bool, largest: float
) -> None:
    values = spread(100_003, signed, generator) * (largest / 100)
    values[256:512] = 0
    values[600] = float("nan")
    for negative in range(1024, 40_000, 512) if signed else ():
        values[negative] = -largest  # the scale of its block
    values[5000:5256] = torch.finfo(torch.float32).smallest_normal * torch.rand(256, generator=generator)
    values[5000] = torch.finfo(torch.float32).smallest_normal
    once = ops.quantize_blockwise(values, signed)
    again = ops.quantize_blockwise(ops.dequantize_blockwise(once, signed), signed)
    assert torch.equal(once.codes, again.codes)
    assert torch.equal(once.scales.view(torch.int32), again.scales.view(torch.int32))


@pytest.mark.parametrize("signed", [True, False])
def test_non_finite_blocks_read_back_as_nan(isa: str, signed: bool) -> None:
    for bad in (float("nan"), float("inf")):
        values = torch.rand(1000)
        values[300] = bad
        quantized = ops.quantize_blockwise(values, signed)
        back = ops.dequantize_blockwise(quantized, signed)
        assert back[256:512].isnan().all() and quantized.scales[1].isnan()
        assert back[:256].isfinite().all() and back[512:].isfinite().all()


@pytest.mark.parametrize("signed", [True, False])
def test_instruction_sets_and_threads_agree_bit_for_bit(generator: torch.Generator, signed: bool) -> None:
    values = spread(100_003, signed, generator)

    def everything() -> list[Tensor]:
        quantized = ops.quantize_blockwise(values, signed)
        return [*quantized, ops.dequantize_blockwise(quantized, signed)]

    assert_same_on_all_isas_and_threads(everything)


def test_refuses_wrong_arguments_by_name() -> None:
    wrong = [
        (torch.ones(8, dtype=torch.float64), "'values': expected dtype .*, got Double"),
        (torch.ones(16)[::2], "'values'.*expected a contiguous tensor"),
        (torch.ones(2, 4), "'values': .*got shape"),
    ]
    for values, message in wrong:
        with pytest.raises(RuntimeError, match=f"quantize_blockwise: argument {message}"):
            ops.quantize_blockwise(values, True)
    with pytest.raises(
        RuntimeError, match=r"values\[2\]: expected at least 0 with the unsigned code, got -1"
    ):
        ops.quantize_blockwise(torch.tensor([0.0, 1.0, -1.0]), False)
    codes, scales = ops.quantize_blockwise(torch.ones(300), True)
    for pair, message in [
        ((codes.int(), scales), "'codes': expected dtype .*, got Int"),
        ((codes, scales.double()), "'scales': expected dtype .*, got Double"),
        ((codes, scales[:1]), "'scales': .*got shape"),
        ((codes[:256], scales), "'scales': .*got shape"),
        ((codes.view(2, 150), scales), "'codes': .*got shape"),
    ]:
        with pytest.raises(RuntimeError, match=f"dequantize_blockwise: argument {message}"):
            ops.dequantize_blockwise(ops.Quantized(*pair), True)
