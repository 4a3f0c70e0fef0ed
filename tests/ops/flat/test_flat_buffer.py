"""pack_, accumulate_, unpack_ and sum_shards_ against torch's own copies and sums."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.ops.helpers import FLOAT_DTYPES, random_bits, same_values
from zero_ext import ops

SHAPES = [(3, 5), (0,), (), (1001,), (7, 11, 13), (16,)]


def make_tensors(dtype: torch.dtype, generator: torch.Generator) -> tuple[list[Tensor], list[int], int]:
    """Tensors of many shapes, their offsets in shuffled order with gaps, and the flat size."""
    tensors = [random_bits(math.prod(shape), dtype, generator).reshape(shape) for shape in SHAPES]
    offsets = [0] * len(tensors)
    position = 3
    for index in torch.randperm(len(tensors), generator=generator).tolist():
        offsets[index] = position
        position += tensors[index].numel() + 2
    return tensors, offsets, position


every_pair = pytest.mark.parametrize(("source", "target"), list(itertools.product(FLOAT_DTYPES, repeat=2)))


@every_pair
def test_pack_and_accumulate(
    isa: str, generator: torch.Generator, target: torch.dtype, source: torch.dtype
) -> None:
    tensors, offsets, size = make_tensors(source, generator)
    packed, summed = torch.full((size,), -7.0, dtype=target), random_bits(size, target, generator)
    wanted_packed, wanted_summed = packed.clone(), summed.clone()
    for tensor, offset in zip(tensors, offsets, strict=True):
        own = slice(offset, offset + tensor.numel())
        wanted_packed[own] = tensor.flatten().to(target)
        wanted_summed[own] = (wanted_summed[own].float() + tensor.flatten().float()).to(target)
    ops.pack_(packed, tensors, offsets)
    ops.accumulate_(summed, tensors, offsets)
    assert same_values(packed, wanted_packed)
    assert same_values(summed, wanted_summed)


@every_pair
def test_unpack(isa: str, generator: torch.Generator, target: torch.dtype, source: torch.dtype) -> None:
    tensors, offsets, size = make_tensors(target, generator)
    flat = random_bits(size, source, generator)
    for tensor in tensors:
        tensor.fill_(math.nan)
    ops.unpack_(flat, tensors, offsets)
    for tensor, offset in zip(tensors, offsets, strict=True):
        wanted = flat[offset : offset + tensor.numel()].to(target)
        assert same_values(tensor.flatten(), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_value_survives(isa: str, dtype: torch.dtype) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    wide = torch.empty(2**16)
    ops.pack_(wide, [values], [0])
    assert same_values(wide, values.float())
    back = torch.empty_like(values)
    ops.unpack_(wide, [back], [0])
    assert same_values(back, values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halfway_values_round_to_even(isa: str, dtype: torch.dtype) -> None:
    limit = {torch.bfloat16: 0x7F7F, torch.float16: 0x7BFF}[dtype]
    values = torch.arange(limit, dtype=torch.int32).to(torch.int16).view(dtype).double()
    following = torch.arange(1, limit + 1, dtype=torch.int32).to(torch.int16).view(dtype).double()
    middle = ((values + following) / 2).float()
    wide = torch.cat([middle, middle.nextafter(torch.zeros(())), middle.nextafter(torch.full((), math.inf))])
    wide = torch.cat([wide, -wide])
    narrow = torch.full((len(wide),), math.nan, dtype=dtype)
    ops.pack_(narrow, [wide], [0])
    assert same_values(narrow, wide.to(dtype))


def test_large_lists_are_split_among_threads(generator: torch.Generator) -> None:
    tensors = [torch.randn(200_000 + i, generator=generator) for i in range(5)]
    offsets = [sum(t.numel() for t in tensors[:i]) for i in range(5)]
    flat = torch.full((sum(t.numel() for t in tensors),), math.nan)
    ops.pack_(flat, tensors, offsets)
    assert torch.equal(flat, torch.cat(tensors))
    ops.accumulate_(flat, tensors, offsets)
    assert torch.equal(flat, 2 * torch.cat(tensors))


@pytest.mark.parametrize("accumulate", [False, True])
@every_pair
def test_sum_shards(
    isa: str, generator: torch.Generator, target: torch.dtype, source: torch.dtype, accumulate: bool
) -> None:
    shards = [torch.randn(1003, generator=generator).to(source) for _ in range(5)]
    out = torch.randn(1003, generator=generator).to(target)
    wanted = shards[0].float()
    for shard in shards[1:]:
        wanted = wanted + shard.float()
    wanted = wanted * torch.tensor(1 / 3)
    if accumulate:
        wanted = wanted + out.float()
    else:
        out.fill_(math.nan)
    ops.sum_shards_(out, shards, 1 / 3, accumulate)
    assert same_values(out, wanted.to(target))
    exact = sum(shard.double() for shard in shards) / 3
    if target == torch.float32 and not accumulate:
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("accumulate", [False, True])
def test_sum_shards_into_one_of_them(generator: torch.Generator, accumulate: bool) -> None:
    shards = [torch.randn(70_001, generator=generator) for _ in range(3)]
    wanted = 0.5 * (shards[0] + shards[1] + shards[2]) + (shards[1] if accumulate else 0)
    ops.sum_shards_(shards[1], shards, 0.5, accumulate)
    assert torch.equal(shards[1], wanted)


def test_one_shard_and_empty() -> None:
    out = torch.full((5,), math.nan)
    ops.sum_shards_(out, [torch.arange(5.0)], 2.0, False)
    assert torch.equal(out, 2 * torch.arange(5.0))
    ops.sum_shards_(torch.empty(0), [torch.empty(0)], 1.0, True)


def test_versions_are_bumped() -> None:
    flat, tensor = torch.zeros(4), torch.ones(4)
    for call in (
        lambda: ops.pack_(flat, [tensor], [0]),
        lambda: ops.accumulate_(flat, [tensor], [0]),
        lambda: ops.sum_shards_(flat, [tensor], 1.0, False),
    ):
        before = flat._version
        call()
        assert flat._version > before
    before = tensor._version
    ops.unpack_(flat, [tensor], [0])
    assert tensor._version > before


ListOp = Callable[[Tensor, list[Tensor], list[int]], None]
LIST_OPS = [ops.pack_, ops.accumulate_, ops.unpack_]


@pytest.mark.parametrize("call", LIST_OPS, ids=lambda call: call.__name__)
def test_list_ops_refuse_wrong_arguments_by_name(call: ListOp) -> None:
    flat, tensor = torch.zeros(8), torch.ones(3)
    cases: list[tuple[Tensor, list[Tensor], list[int], str]] = [
        (flat.double(), [tensor], [0], "argument 'flat': expected dtype .*, got Double"),
        (flat.reshape(2, 4), [tensor], [0], "argument 'flat': expected .*got shape"),
        (torch.zeros(16)[::2], [tensor], [0], "argument 'flat'.*a contiguous tensor"),
        (flat, [tensor, tensor.long()], [0, 4], r"argument 'tensors\[1\]': expected dtype .*, got Long"),
        (flat, [torch.ones(3, 4).T], [0], r"argument 'tensors\[0\]'.*a contiguous tensor"),
        (flat, [tensor], [], "offsets: expected one for each of 1 tensors, got 0"),
        (flat, [tensor], [6], r"tensors\[0\]: .*of argument 'flat', got 3 elements at offset 6"),
        (flat, [tensor], [-1], r"tensors\[0\]: .*of argument 'flat', got 3 elements at offset -1"),
        (flat, [tensor], [2**62], f"got 3 elements at offset {2**62}"),
        (
            flat,
            [tensor, torch.ones(3)],
            [0, 2],
            r"'offsets\[1\]': expected its own memory, got some of argument 'offsets\[0\]'",
        ),
        (flat, [flat[:3]], [4], "expected its own memory, got some of argument"),
    ]
    for target, tensors, offsets, message in cases:
        with pytest.raises(RuntimeError, match=f"{call.__name__}: {message}|{message}"):
            call(target, tensors, offsets)
        assert not target.any()
        assert all(bool((each == 1).all()) for each in tensors if each.data_ptr() != flat.data_ptr())


def test_sum_shards_refuses_wrong_arguments_by_name() -> None:
    out, shard = torch.zeros(4), torch.ones(4)
    cases = [
        (out.double(), [shard], 1.0, "'out': expected dtype .*, got Double"),
        (out, [], 1.0, "'shards': expected at least one tensor, got none"),
        (out, [shard, shard.bfloat16()], 1.0, r"'shards\[1\]': expected dtype .*, got BFloat16"),
        (out, [shard, torch.ones(5)], 1.0, r"'shards\[1\]': .*got shape \[5\]"),
        (out, [torch.ones(8)[::2]], 1.0, r"'shards\[0\]'.*a contiguous tensor"),
        (out, [shard.int()], 1.0, r"'shards\[0\]': expected dtype .*, got Int"),
        (out, [shard], math.nan, "scale: .*got nan"),
    ]
    for target, shards, scale, message in cases:
        with pytest.raises(RuntimeError, match=f"sum_shards_: .*{message}"):
            ops.sum_shards_(target, shards, scale, False)
        assert not target.any()
    memory = torch.zeros(6)
    with pytest.raises(RuntimeError, match="expected its own memory"):
        ops.sum_shards_(memory[:4], [memory[2:]], 1.0, False)
    with pytest.raises(RuntimeError, match="expected its own memory"):
        ops.sum_shards_(memory.view(torch.bfloat16)[:4], [memory[:4]], 1.0, False)
