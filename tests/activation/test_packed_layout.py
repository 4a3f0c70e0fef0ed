"""Tensors of any shape, strides and dtype are restored from their regions, packed by one rank or several."""

from __future__ import annotations

import secrets

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_ext.activation.packed_layout import PackedLayout, fits

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.int8, torch.complex64]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A strided tensor: permuted, sliced, expanded, in overlapping windows or not."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    tensor = (torch.rand(shape, generator=generator) * 200 - 100).to(dtype)
    if shape and draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        tensor = tensor[..., draw(st.integers(0, tensor.shape[-1] - 1)) :]
    if shape and draw(st.booleans()):
        tensor = tensor[:: draw(st.integers(1, 3))]
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    if shape and draw(st.booleans()):
        tensor = tensor.unfold(-1, draw(st.integers(1, tensor.shape[-1])), 1)
    return tensor


@settings(max_examples=150, deadline=None)
@given(st.lists(tensors(), min_size=1, max_size=4), st.integers(1, 5), st.sampled_from([64, 4096]))
def test_round_trip(sources: list[torch.Tensor], ranks: int, block: int) -> None:
    layout = PackedLayout.of(sources, ranks, block)
    assert layout.shard_bytes % block == 0 and layout.shard_bytes * ranks == layout.nbytes
    region = torch.full((layout.nbytes,), 0xAB, dtype=torch.uint8)
    for rank, shard in enumerate(region.chunk(ranks)):
        layout.pack(shard, sources, rank)
    for found, wanted in zip(layout.tensors(region), sources, strict=True):
        assert torch.equal(found, wanted) and found.dtype == wanted.dtype
        assert found.stride() == wanted.stride()
        assert found.data_ptr() % 64 == wanted.data_ptr() % 64  # kernels may begin by it


def test_bytes_of_expanded_and_sparse_views() -> None:
    print(seed := secrets.randbits(31))
    torch.manual_seed(seed)
    row = torch.randn(256)
    assert PackedLayout.of([row.expand(1000, 256)]).nbytes == row.nbytes
    column = torch.randn(256, 256)[:, 3]
    assert PackedLayout.of([column]).nbytes == 256 * 4
    assert PackedLayout.of([column.expand(1000, 256)]).nbytes == 256 * 4
    queries = torch.randn(32, 3 * 64).chunk(3, -1)[0]
    assert PackedLayout.of([queries]).nbytes == 32 * 64 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("ranks", [1, 3])
def test_all_bits_come_back(dtype: torch.dtype, ranks: int) -> None:
    """Of values that no arithmetic makes too: every kind of NaN, zeros of both signs, subnormal numbers."""
    print(seed := secrets.randbits(31))
    bits = torch.randint(0, 256, (200_001 * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    values = bits.to(torch.uint8).view(dtype)
    sources = [values, values[1:], values[: 300 * 600].view(300, 600)[:, ::7], values[:4096].view(64, 64).t()]
    layout = PackedLayout.of(sources, ranks)
    region = torch.full((layout.nbytes,), 0xAB, dtype=torch.uint8)
    for rank, shard in enumerate(region.chunk(ranks)):
        layout.pack(shard, sources, rank)
    for found, wanted in zip(layout.tensors(region), sources, strict=True):
        assert torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def test_memory_that_begins_between_elements() -> None:
    tensor = torch.frombuffer(bytearray(range(1, 102)), dtype=torch.float32, offset=1)
    layout = PackedLayout.of([tensor])
    region = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.pack(region, [tensor], 0)
    assert torch.equal(layout.tensors(region)[0].view(torch.uint8), tensor.view(torch.uint8))


def test_what_is_not_plain_memory() -> None:
    plain = torch.randn(3, 3)
    assert fits(plain)
    for other in (
        torch.nn.Parameter(plain),
        plain.to_sparse(),
        torch.empty(0),
        torch.empty(3, 3, device="meta"),
        torch.randn(2, dtype=torch.complex64).conj(),
    ):
        assert not fits(other)
