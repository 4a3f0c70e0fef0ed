"""Signs and blocks of integers on the device: the CPU's bits, which the tests of the ops hold to float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.helpers import FLOAT_DTYPES, same_values
from zero_ext import ops

# Elements of a part: shorter than a word, of odd rows, one whole block of signs and what is beside it.
SHARES = [1, 33, 8192, 20_011]
FORMATS = [ops.BlockFormat(bits, symmetric) for bits in (4, 8) for symmetric in (True, False)]


def alike(device: torch.device, op: Callable[..., None], written: list[Tensor], *rest: Any) -> None:
    """`op(*written, *rest)` leaves the same in `written` on the device as on the CPU."""
    on_device = [tensor.to(device, copy=True) for tensor in written]
    op(*on_device, *(each.to(device) if isinstance(each, Tensor) else each for each in rest))
    op(*written, *rest)
    for found, wanted in zip(on_device, written, strict=True):
        same = torch.equal if wanted.dtype == torch.uint8 else same_values
        assert same(found.cpu(), wanted), op


def guarded(count: int) -> Tensor:
    """Bytes that a message is to be written to."""
    return torch.full((count,), 0xA5, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("share", SHARES)
def test_onebit(device: torch.device, generator: torch.Generator, share: int, dtype: torch.dtype) -> None:
    chunks, message = 3, ops.sign_payload_bytes(share)
    values, errors, total, error = (
        torch.randn(count, generator=generator) for count in (chunks * share, chunks * share, share, share)
    )
    messages, out = guarded(chunks * message), torch.randn(chunks * share, generator=generator).to(dtype)
    alike(device, ops.compress_1bit_, [messages, errors], values.to(dtype), 0.5, chunks)
    for accumulate in (True, False):
        alike(device, ops.decompress_1bit_, [out], messages, 3.0, accumulate, chunks)
        alike(device, ops.sum_1bit_, [total], messages, 1 / 3, accumulate)
    alike(device, ops.reduce_1bit_, [guarded(message), error], messages, 1 / 3)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_blocks_of_integers(
    device: torch.device, generator: torch.Generator, form: ops.BlockFormat, dtype: torch.dtype
) -> None:
    chunks = 4
    for share in SHARES:
        message = form.payload_bytes(share)
        values, total = (torch.randn(count, generator=generator) for count in (chunks * share, share))
        messages = guarded(chunks * message)
        alike(device, ops.quantize_, [messages], values.to(dtype), form, chunks, [2, 0, 3, 1])
        alike(device, ops.dequantize_, [torch.empty_like(values, dtype=dtype)], messages, form, chunks)
        for accumulate in (True, False):
            alike(device, ops.sum_quantized_, [total], messages, form, 0.25, accumulate)
        for to in FORMATS:  # two parts of two messages each
            again = guarded(2 * to.payload_bytes(share))
            alike(device, ops.requantize_, [again], messages, form, to, 0.5, 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_spreads_over_its_block(device: torch.device, value: float) -> None:
    values = torch.ones(3 * 8192, device=device)
    values[8192 + 5] = value
    errors = torch.zeros_like(values)
    messages = guarded(ops.sign_payload_bytes(values.numel())).to(device)
    ops.compress_1bit_(messages, errors, values, 1.0, 1)
    ops.decompress_1bit_(errors, messages, 1.0, False, 1)
    for form in FORMATS:
        bad = slice(8192, 8192 + form.block)
        messages = guarded(form.payload_bytes(values.numel())).to(device)
        ops.quantize_(messages, values, form, 1, None)
        back = torch.empty_like(values)
        ops.dequantize_(back, messages, form, 1)
        assert not bool(back[bad].isfinite().any())
        back[bad] = 1
        assert bool(back.isfinite().all())
    assert not bool(errors[8192 : 2 * 8192].isfinite().any())
    errors[8192 : 2 * 8192] = 1
    assert torch.equal(errors, torch.ones_like(errors))
