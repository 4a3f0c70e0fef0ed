"""Flat buffers, sums of shards and the exact norm on the device: the CPU's results, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.flat.test_flat_buffer import make_tensors
from tests.ops.flat.test_squared_norm import exact_sum, held_sum, normal, sparse, wide
from tests.ops.helpers import FLOAT_DTYPES, random_bits, same_values
from zero_ext import ops

OPS = {"pack_": ops.pack_, "accumulate_": ops.accumulate_, "unpack_": ops.unpack_}
KINDS: list[Any] = [normal, sparse, wide(4), wide(60), random_bits]


@pytest.mark.parametrize("name", sorted(OPS))
@pytest.mark.parametrize("source", FLOAT_DTYPES)
@pytest.mark.parametrize("target", FLOAT_DTYPES)
def test_slices(
    device: torch.device, generator: torch.Generator, name: str, source: torch.dtype, target: torch.dtype
) -> None:
    tensors, offsets, size = make_tensors(source, generator)
    flat = random_bits(size, target, generator)
    on_device, on_device_tensors = (
        flat.to(device, copy=True),
        [tensor.to(device, copy=True) for tensor in tensors],
    )
    OPS[name](on_device, on_device_tensors, offsets)
    OPS[name](flat, tensors, offsets)
    assert same_values(on_device.cpu(), flat)
    for found, wanted in zip(on_device_tensors, tensors, strict=True):
        assert same_values(found.cpu().flatten(), wanted.flatten())


def test_a_thousand_slices_in_one_call(device: torch.device, generator: torch.Generator) -> None:
    sizes = torch.randint(0, 700, (1000,), generator=generator).tolist()
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    offsets = [sum(sizes[:number]) for number in range(len(sizes))]
    flat = torch.full((sum(sizes),), float("nan"), dtype=torch.bfloat16, device=device)
    ops.pack_(flat, [tensor.to(device) for tensor in tensors], offsets)
    assert torch.equal(flat.cpu(), torch.cat(tensors).bfloat16())


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("source", FLOAT_DTYPES)
@pytest.mark.parametrize("target", FLOAT_DTYPES)
def test_sums_of_shards(
    device: torch.device,
    generator: torch.Generator,
    target: torch.dtype,
    source: torch.dtype,
    accumulate: bool,
) -> None:
    shards = [torch.randn(3001, generator=generator).to(source) for _ in range(7)]
    out = torch.randn(3001, generator=generator).to(target)
    found = out.to(device, copy=True)
    ops.sum_shards_(found, [shard.to(device) for shard in shards], 1 / 7, accumulate)
    ops.sum_shards_(out, shards, 1 / 7, accumulate)
    assert same_values(found.cpu(), out)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_squared_norm_is_exact(
    device: torch.device, generator: torch.Generator, kind: Any, dtype: torch.dtype
) -> None:
    values: Tensor = kind(20_011, dtype, generator)
    accumulator = torch.zeros(33, dtype=torch.int64, device=device)
    for chunk in values.to(device).split(7_001):
        ops.squared_norm_(chunk.contiguous(), accumulator)
    wanted = torch.zeros(33, dtype=torch.int64)
    ops.squared_norm_(values, wanted)
    assert held_sum(accumulator.cpu()) == exact_sum(values)
    assert torch.equal(accumulator.cpu(), wanted)
    assert same_double(ops.squared_norm_value(accumulator), ops.squared_norm_value(wanted))


def same_double(one: Tensor, two: Tensor) -> bool:
    """Equal, or both NaN."""
    return bool(torch.equal(one.cpu().nan_to_num(-1.0), two.nan_to_num(-1.0)))
