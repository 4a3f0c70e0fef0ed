"""Flat layouts: every element has one position; and values compared between ranks by digests."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext import ops
from zero_ext.comm.process_group import make_collectives
from zero_ext.zero.units.collective_errors import refuse_different
from zero_ext.zero.units.flat_layout import ALIGNMENT_BYTES, FlatLayout, ParameterSpec, memory_order

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), min_size=1, max_size=8)
DTYPES = st.sampled_from(
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.complex128]
)
WORLDS = st.integers(1, 70)


def layout_of(shapes: list[tuple[int, ...]], dtype: torch.dtype, world_size: int) -> FlatLayout:
    specs = [
        ParameterSpec(f"p{number}", shape, torch.empty(shape).stride(), dtype)
        for number, shape in enumerate(shapes)
    ]
    return FlatLayout.build(specs, world_size)


@given(SHAPES, DTYPES, WORLDS)
def test_shards_are_equal_aligned_and_as_short_as_that_allows(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, world_size: int
) -> None:
    layout = layout_of(shapes, dtype, world_size)
    assert layout.nbytes == layout.numel * dtype.itemsize
    assert layout.shard_numel * world_size == layout.numel > 0
    assert layout.shard_numel * dtype.itemsize % ALIGNMENT_BYTES == 0
    ranges = [layout.shard_range(rank) for rank in range(world_size)]
    assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == layout.numel
    padded = sum(math.ceil(math.prod(shape) * dtype.itemsize / ALIGNMENT_BYTES) for shape in shapes)
    assert layout.nbytes == math.ceil(max(padded, 1) / world_size) * world_size * ALIGNMENT_BYTES


@given(SHAPES, DTYPES, WORLDS)
def test_every_element_has_exactly_one_position(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, world_size: int
) -> None:
    layout = layout_of(shapes, dtype, world_size)
    owner = [-1] * layout.numel
    for index, (spec, offset) in enumerate(zip(layout.specs, layout.offsets, strict=True)):
        assert offset * dtype.itemsize % ALIGNMENT_BYTES == 0
        for position in range(offset, offset + spec.numel):
            assert owner[position] == -1
            owner[position] = index
    gaps = {position for begin, end in layout.gaps for position in range(begin, end)}
    assert gaps == {position for position, index in enumerate(owner) if index == -1}


@given(SHAPES, DTYPES, WORLDS, st.data())
def test_segments_of_any_range_locate_each_element(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, world_size: int, data: st.DataObject
) -> None:
    layout = layout_of(shapes, dtype, world_size)
    cuts = sorted(data.draw(st.lists(st.integers(0, layout.numel), max_size=5)))
    seen: dict[tuple[str, int], int] = {}
    for begin, end in itertools.pairwise([0, *cuts, layout.numel]):
        for segment in layout.segments(begin, end):
            assert segment.numel > 0 and segment.end <= end - begin
            for step in range(segment.numel):
                element = (segment.name, segment.start + step)
                assert element not in seen
                seen[element] = begin + segment.begin + step
    wanted = {
        (spec.name, element): offset + element
        for spec, offset in zip(layout.specs, layout.offsets, strict=True)
        for element in range(spec.numel)
    }
    assert seen == wanted


@given(SHAPES.map(lambda shapes: max(shapes, key=len)), st.randoms(use_true_random=False))
def test_memory_order_preserves_dense_strides_and_replaces_others(
    shape: tuple[int, ...], rng: object
) -> None:
    order = list(range(len(shape)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    permuted = torch.empty([shape[dim] for dim in order]).permute(
        [order.index(dim) for dim in range(len(shape))]
    )
    assert tuple(permuted.shape) == shape
    contiguous = torch.empty(shape).stride()
    stride = memory_order(permuted)
    assert stride == (permuted.stride() if math.prod(shape) else contiguous)
    if math.prod(shape) > 1:
        assert memory_order(torch.zeros(()).expand(shape)) == contiguous
        assert memory_order(torch.empty([*shape, 2])[..., 0]) == contiguous


def test_mistakes_are_named() -> None:
    single = ParameterSpec("w", (2,), (1,), torch.float32)
    with pytest.raises(ValueError, match="world_size: expected at least 1, got 0"):
        FlatLayout.build([single], 0)
    with pytest.raises(ValueError, match="one dtype"):
        FlatLayout.build([single, ParameterSpec("v", (2,), (1,), torch.float16)], 2)
    with pytest.raises(ValueError, match="one dtype"):
        FlatLayout.build([], 2)
    with pytest.raises(ValueError, match="rank: expected 0 to 1, got 2"):
        FlatLayout.build([single], 2).shard_range(2)


CASTAGNOLI = 0x1EDC6F41


def multiple_of_the_polynomial() -> torch.Tensor:
    """8 bytes that change no CRC32C: the bits of its polynomial, the highest power first."""
    bits = [1, *((CASTAGNOLI >> power) & 1 for power in range(31, -1, -1))]
    return torch.tensor(list(sum(bit << at for at, bit in enumerate(bits)).to_bytes(8, "little")))


@on_ranks(2)
@pytest.mark.parametrize("case", ["one element", "the same CRC32C", "a longer value"])
def test_different_values_are_refused(world: World, case: str) -> None:
    value = torch.randint(256, (64,), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    other = value.clone()
    if case == "one element":
        other[5] ^= 1
    elif case == "the same CRC32C":
        other[16:24] ^= multiple_of_the_polynomial().to(torch.uint8)
        assert ops.crc32c(value) == ops.crc32c(other)
    else:
        other = torch.cat([value, torch.zeros(8, dtype=torch.uint8)])
    collectives = make_collectives(world.group, 20.0)
    refuse_different(collectives, "a write", value, "")
    refuse_different(collectives, "a write", value[:0], "")
    with pytest.raises(RuntimeError, match=r"got another on ranks \[1\] than on rank 0"):
        refuse_different(collectives, "a write", other if world.rank else value, "")
