"""The device's block-sparse attention against dense attention in float64 and against torch's own."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.gpu.helpers import captured
from tests.ops.attention_reference import Case, reference, results
from tests.ops.helpers import FLOAT_DTYPES
from tests.ops.test_attention import TOLERANCE

BIASES = [
    (),
    (2, 4, 150, 170),
    (1, 4, 1, 170),
    (1, 1, 150, 170),
    (2, 1, 150, 1),
    (1, 4, 1, 1),
    (1, 1, 1, 170),
]
# Of the error of torch's attention on the same inputs, against float64.
MOST_OF_TORCHS_ERROR = 2.0


def moved(case: Case, device: torch.device) -> Case:
    """The case with all tensors on `device`."""
    case_fields = {field.name: getattr(case, field.name) for field in fields(case)}
    return replace(
        case, **{name: each.to(device) for name, each in case_fields.items() if isinstance(each, Tensor)}
    )


def make_case(
    generator: torch.Generator, dtype: torch.dtype, block: int, dim: int, bias: tuple[int, ...] = ()
) -> Case:
    """Two batches, four heads that share two key heads, lengths that no block divides, empty rows."""
    lengths = (150, 170)
    rows = [
        torch.randn(2, heads, length, dim, generator=generator).to(dtype)
        for heads, length in ((4, lengths[0]), (2, lengths[1]), (2, lengths[1]))
    ]
    blocks = [-(-length // block) for length in lengths]
    mask = torch.rand(4, *blocks, generator=generator) < 0.4
    values = torch.randn(bias, generator=generator).to(dtype) if bias else None
    return Case(rows[0], rows[1], rows[2], mask, block, bias=values)


def check(case: Case, device: torch.device, generator: torch.Generator) -> None:
    """Output and gradients on the device against float64."""
    grad_output = torch.randn(case.query.shape, generator=generator).to(case.query.dtype)
    wanted = reference(case, grad_output)
    found = results(moved(case, device), grad_output.to(device))
    assert set(found) == set(wanted.values)
    for name, value in found.items():
        assert value.device.type == device.type and value.isfinite().all(), name
        error = float((value.double().cpu() - wanted.values[name]).abs().max())
        assert error <= TOLERANCE[case.query.dtype] * max(wanted.sizes[name], 1e-3), (name, error)


@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_every_block_and_head_dim(
    device: torch.device, generator: torch.Generator, dtype: torch.dtype, block: int, dim: int
) -> None:
    check(make_case(generator, dtype, block, dim), device, generator)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_masks_dropout_and_every_bias(
    device: torch.device, generator: torch.Generator, dtype: torch.dtype, bias: tuple[int, ...]
) -> None:
    """Dropout too: the device draws the weights that the reference draws."""
    case = make_case(generator, dtype, 32, 64, bias)
    padding = torch.rand(2, 170, generator=generator) < 0.8
    check(
        replace(case, causal=True, key_padding=padding, dropout=0.3, seed=2**40 + 3, offset=5),
        device,
        generator,
    )


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """The norm of each difference."""
    return {name: float((found[name].cpu().double() - each).norm()) for name, each in wanted.items()}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_error_is_at_most_twice_that_of_torch(
    device: torch.device, generator: torch.Generator, dtype: torch.dtype, causal: bool
) -> None:
    """With all blocks, where torch's attention computes the same."""
    rows = [torch.randn(2, 4, 320, 64, generator=generator).to(dtype) for _ in range(3)]
    case = Case(rows[0], rows[1], rows[2], torch.ones(1, 5, 5, dtype=torch.bool), 64, causal=causal)
    grad_output = torch.randn(case.query.shape, generator=generator).to(dtype)
    wanted = reference(case, grad_output).values
    there = moved(case, device)
    leaves = [each.detach().requires_grad_() for each in (there.query, there.key, there.value)]
    output = scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=causal)
    gradients = torch.autograd.grad(output, leaves, grad_output.to(device))
    theirs = dict(zip(("output", "query", "key", "value"), (output.detach(), *gradients), strict=True))
    bars = errors(theirs, wanted)
    for name, error in errors(results(there, grad_output.to(device)), wanted).items():
        assert error <= MOST_OF_TORCHS_ERROR * bars[name], (name, error, bars[name])


def test_results_are_the_same_bits_again(device: torch.device, generator: torch.Generator) -> None:
    """Also of a bias that heads and batches share, whose gradient is a sum over them."""
    case = moved(make_case(generator, torch.bfloat16, 16, 64, (1, 1, 150, 170)), device)
    grad_output = torch.randn(case.query.shape, generator=generator).bfloat16().to(device)
    first = results(case, grad_output)
    for _ in range(3):
        for name, value in results(case, grad_output).items():
            assert torch.equal(value, first[name]), name


def test_rows_that_begin_anywhere(device: torch.device, generator: torch.Generator) -> None:
    """Views whose rows accesses of 16 bytes do not meet, and heads next to each other in a row."""
    case = make_case(generator, torch.bfloat16, 32, 64)
    wide = torch.randn(2, 4, 150, 67, generator=generator).bfloat16()
    check(replace(case, query=wide[..., 3:]), device, generator)
    interleaved = torch.randn(2, 170, 2, 64, generator=generator).bfloat16().transpose(1, 2)
    check(replace(case, key=interleaved), device, generator)


def test_a_graph_sees_new_values(device: torch.device, generator: torch.Generator) -> None:
    """Forward and backward are captured without waiting for the device; replays read what is there then."""
    case = moved(make_case(generator, torch.float16, 64, 128, (1, 4, 1, 170)), device)
    grad_output = torch.randn(case.query.shape, generator=generator).half().to(device)
    found: dict[str, Tensor] = {}
    replay = captured(device, lambda: found.update(results(case, grad_output)))
    for _ in range(2):
        case.query.copy_(torch.randn(case.query.shape, generator=generator))
        replay()
        for name, value in results(case, grad_output).items():
            assert torch.equal(found[name], value), name
