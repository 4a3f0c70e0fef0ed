"""Ranges of experts in a flat buffer, against slices of the parameters themselves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from zero_ext.config.buffer_sizes import STORAGE_ALIGNMENT
from zero_ext.offload import CopyHandle
from zero_ext.offload.shard_storage import MemoryShard, TransferStats
from zero_ext.zero.units.expert_ranges import ExpertRanges, fetch_ranges, is_stacked, merged
from zero_ext.zero.units.flat_layout import FlatLayout, ParameterSpec

EXPERTS = 4
SHAPES = {
    "up": (EXPERTS, 3, 5),
    "bias": (EXPERTS, 6),
    "scale": (7,),
    "down": (EXPERTS, 5, 2),
    "rows": (EXPERTS, 3),
}
STACKED = {"up", "bias", "down"}  # "rows" has as many rows by chance


def layout_of(dtype: torch.dtype) -> FlatLayout:
    specs = [
        ParameterSpec(name, shape, torch.empty(shape, device="meta").stride(), dtype)
        for name, shape in SHAPES.items()
    ]
    return FlatLayout.build(specs, world_size=2)


@pytest.mark.parametrize("chosen", [[], [0], [1, 3], [2, 1], range(EXPERTS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_ranges_and_blanks(chosen: Sequence[int], dtype: torch.dtype) -> None:
    layout = layout_of(dtype)
    ranges = ExpertRanges(layout, EXPERTS, STACKED)
    expected = torch.zeros(layout.numel, dtype=torch.bool)
    blank = torch.zeros(layout.numel, dtype=torch.bool)
    others = [number for number in range(EXPERTS) if number not in chosen]
    for spec, offset in zip(layout.specs, layout.offsets, strict=True):
        view = expected.as_strided(spec.shape, spec.stride, offset)
        if spec.name not in STACKED:
            view[:] = True
        else:
            view[list(chosen)] = True
            blank.as_strided(spec.shape, spec.stride, offset)[others] = True
    found = torch.zeros(layout.numel, dtype=torch.bool)
    for begin, end in ranges.of(chosen, shared=True):
        assert not found[begin:end].any()
        found[begin:end] = True
    assert torch.equal(found, expected)
    flat = torch.ones(layout.numel, dtype=dtype)
    ranges.blank_others(flat, frozenset(chosen))
    empty = blank | ~(expected | blank)
    if dtype.is_floating_point:
        assert torch.equal(flat.isnan(), blank)
        empty &= ~blank
    assert bool((flat[empty] == 0).all())
    assert bool((flat[expected] == 1).all())


def test_what_counts_as_stacked() -> None:
    spec = ParameterSpec("up", (EXPERTS, 3, 5), (15, 5, 1), torch.float32)
    assert is_stacked(spec, EXPERTS)
    assert not is_stacked(spec, EXPERTS + 1)
    transposed = ParameterSpec("up", (EXPERTS, 3, 5), (5, 20, 1), torch.float32)
    assert not is_stacked(transposed, EXPERTS)
    assert not is_stacked(ParameterSpec("scale", (EXPERTS,), (1,), torch.float32), EXPERTS)


def test_ranges_that_touch_are_one() -> None:
    assert merged([(5, 7), (0, 2), (2, 3), (6, 9)]) == [(0, 3), (5, 9)]


class _Blocks(MemoryShard):
    """Memory that is read in blocks, as NVMe is, and notes what was read."""

    grain = STORAGE_ALIGNMENT // 4

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__("host", values, TransferStats())
        self.reads: list[tuple[int, int]] = []

    def fetch(self, into: torch.Tensor, begin: int = 0, target: object = "device") -> CopyHandle:
        self.reads.append((begin, begin + into.numel()))
        return super().fetch(into, begin)


def test_storage_is_read_in_blocks_of_its_own_slice() -> None:
    grain = _Blocks.grain
    values = torch.arange(3 * grain, dtype=torch.float32)
    storage, own, first = _Blocks(values), torch.zeros(3 * grain), 3 * grain
    ranges = [
        (0, 10),
        (first - 1, first + 1),
        (first + 2, first + 3),
        (first + 2 * grain + 1, first + 9 * grain),
    ]
    fetch_ranges(storage, own, first, ranges).wait()
    assert storage.reads == [(0, grain), (2 * grain, 3 * grain)]
    assert torch.equal(own[:grain], values[:grain]) and torch.equal(own[2 * grain :], values[2 * grain :])
    assert not own[grain : 2 * grain].any()
