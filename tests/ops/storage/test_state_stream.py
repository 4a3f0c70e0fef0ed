"""state_stream ops against adam_step_ on the same state in memory, and on bad input."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tests.ops.helpers import FLOAT_DTYPES
from tests.ops.stores import ALIGNMENT, STORE_BYTES, open_store
from zero_ext import ops

SMALLEST_RING = 327680  # of Adam with float32 moments
HANDLE = 7


def counters() -> Tensor:
    return torch.zeros(len(ops.STREAM_COUNTERS), dtype=torch.int64)


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with open_store(tmp_path_factory.mktemp("store")) as handle:
        yield handle


def open_stream(store: int, staging_buffer_bytes: int, moments: torch.dtype = torch.float32) -> int:
    ops.state_stream_open(HANDLE, store, staging_buffer_bytes, *ops.ADAM_FIELDS[moments])
    return HANDLE


def test_opcheck(store: int) -> None:
    stream = open_stream(store, SMALLEST_RING)
    hyper = torch.tensor([[1e-3, 0.9, 0.999, 1e-8, 0.1, 1, 1, 0]], dtype=torch.float64)
    bounds = torch.tensor([[0, 9]])
    ranges = torch.tensor([[9, 0, -1, -1, 1, -1]])
    step = ([torch.rand(9).half()], [torch.rand(9)], bounds, hyper, torch.tensor(1.0), counters())
    arguments = (0, 16, 2, 7, [0, 2], [torch.rand(5), torch.rand(5)], counters())
    fields = ops.ADAM_FIELDS[torch.bfloat16]
    opcheck(torch.ops.zero_ext.state_stream_fill_.default, (stream, 0, torch.rand(16), counters()))
    opcheck(torch.ops.zero_ext.state_stream_adam_.default, (stream, ranges, *step))
    flag = torch.zeros(1, dtype=torch.int32)
    opcheck(torch.ops.zero_ext.state_stream_adam_.default, (stream, ranges, *step, flag))
    opcheck(torch.ops.zero_ext.state_stream_read_.default, (stream, *arguments))
    opcheck(torch.ops.zero_ext.state_stream_write_.default, (stream, *arguments))
    opcheck(torch.ops.zero_ext.state_stream_chunk_elements.default, (stream,))
    opcheck(torch.ops.zero_ext.state_stream_extent_bytes.default, (stream, 1000))
    opcheck(torch.ops.zero_ext.state_stream_open.default, (stream, store, 1 << 20, *fields))
    opcheck(torch.ops.zero_ext.state_stream_close.default, (stream,))


@dataclass
class Range:
    """One range in memory, as adam_step_ takes it, and where it lies in the store (-1: it does not)."""

    state: list[Tensor]
    grad: Tensor
    param: Tensor | None
    bounds: list[tuple[int, int]]
    rows: list[list[float]]
    offsets: list[int] = field(default_factory=lambda: [-1, -1, -1])
    target: int = -1  # where the state goes, if not back

    @property
    def elements(self) -> int:
        return self.grad.numel()

    def step_in_memory(self, scale: Tensor) -> None:
        bounds = torch.tensor(self.bounds, dtype=torch.int64).reshape(-1, 2)
        hyper = torch.tensor(self.rows, dtype=torch.float64).reshape(-1, 8)
        if len(self.state) == 3:
            ops.adam_step_(*self.state, self.grad, self.param, bounds, hyper, scale)
            return
        moments = [ops.Quantized(self.state[i + 2], self.state[i]) for i in (1, 2)]
        ops.adam_step_8bit_(self.state[0], *moments, self.grad, self.param, bounds, hyper, scale)


def random_range(random: Random, elements: int, moments: torch.dtype, types: list[torch.dtype]) -> Range:
    generator = torch.Generator().manual_seed(random.randrange(2**32))

    def normal() -> Tensor:
        return torch.randn(elements, generator=generator)

    cuts = sorted(random.choices(range(elements + 1), k=6))
    bounds = [(cuts[i], cuts[i + 1]) for i in range(5) if random.random() < 0.7]
    rows = [
        [1e-2, random.choice([0.9, 0.3]), 0.99, 1e-8, 0.1, random.randint(1, 9), i % 2, 0]
        for i in range(len(bounds))
    ]
    master = normal()
    param = None if len(types) < 2 else master.to(types[1], copy=True)
    state = [master, normal().to(moments), normal().square().to(moments)]
    if moments is torch.uint8:
        scales = [normal().abs()[: ops.block_count(elements)] for _ in range(2)]
        codes = [torch.randint(256, (elements,), generator=generator).to(moments) for _ in range(2)]
        state = [master, *scales, *codes]
    return Range(state, normal().to(types[0]), param, bounds, rows)


def allocate_ranges(random: Random, stream: int, ranges: list[Range]) -> None:
    """Gives every range extents in the store; gradients and parameters stay in memory at random."""
    end = 0
    for each in ranges:
        if random.random() < 0.5:
            each.target = end
            end += ops.state_stream_extent_bytes(stream, each.elements) + ALIGNMENT
        sizes = [ops.state_stream_extent_bytes(stream, each.elements), 0, 0]
        if random.random() < 0.5:
            sizes[1] = each.grad.nbytes
        if each.param is not None and random.random() < 0.5:
            sizes[2] = each.param.nbytes
        for i, size in enumerate(sizes):
            if i == 0 or size:
                each.offsets[i] = end
                end += -(-size // ALIGNMENT) * ALIGNMENT + ALIGNMENT
    assert end <= STORE_BYTES


def raw_write(stream: int, offset: int, tensor: Tensor) -> None:
    """Bytes of a tensor as they are, through a stream of one float32 field and chunks of one transfer."""
    padded = torch.zeros(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT, dtype=torch.uint8)
    padded[: tensor.nbytes] = tensor.view(torch.uint8)
    words = padded.view(torch.float32)
    ops.state_stream_write_(stream, offset, words.numel(), 0, words.numel(), [0], [words], counters())


def raw_read(stream: int, offset: int, like: Tensor) -> Tensor:
    words = torch.empty(-(-like.nbytes // ALIGNMENT) * ALIGNMENT // 4)
    ops.state_stream_read_(stream, offset, words.numel(), 0, words.numel(), [0], [words], counters())
    return words.view(torch.uint8)[: like.nbytes].view(like.dtype)


def save(stream: int, raw: int, each: Range) -> None:
    arguments = (each.offsets[0], each.elements, 0, each.elements, [*range(len(each.state))])
    ops.state_stream_write_(stream, *arguments, each.state, counters())
    if each.offsets[1] >= 0:
        raw_write(raw, each.offsets[1], each.grad)
    if each.offsets[2] >= 0 and each.param is not None:
        raw_write(raw, each.offsets[2], each.param)


def step(stream: int, ranges: list[Range], params: list[Tensor], scale: Tensor, count: Tensor) -> None:
    rows = [[each.elements, *each.offsets, len(each.bounds), each.target] for each in ranges]
    grads = [each.grad if each.offsets[1] < 0 else each.grad[:0] for each in ranges]
    bounds = [pair for each in ranges for pair in each.bounds]
    hyper = [row for each in ranges for row in each.rows]
    ops.state_stream_adam_(
        stream,
        torch.tensor(rows),
        params,
        grads,
        torch.tensor(bounds, dtype=torch.int64).reshape(-1, 2),
        torch.tensor(hyper, dtype=torch.float64).reshape(-1, 8),
        scale,
        count,
    )


@pytest.mark.parametrize("param", [None, *FLOAT_DTYPES])
@pytest.mark.parametrize("grad", FLOAT_DTYPES)
@pytest.mark.parametrize("moments", list(ops.ADAM_FIELDS))
@pytest.mark.parametrize("scale", [0.25, float("inf")])  # the second skips the step
def test_equals_the_step_in_memory_bit_for_bit(
    store: int,
    generator: torch.Generator,
    scale: float,
    moments: torch.dtype,
    grad: torch.dtype,
    param: torch.dtype | None,
) -> None:
    random = Random(generator.initial_seed())
    ops.state_stream_open(8, store, 1 << 20, (4,), (1,))
    stream = open_stream(store, random.randint(SMALLEST_RING, 4 * SMALLEST_RING), moments)
    types = [grad] if param is None else [grad, param]
    sizes = [0, 1, *(random.randrange(2, 60_000) for _ in range(4))]
    random.shuffle(sizes)
    ranges = [random_range(random, size, moments, types) for size in sizes]
    allocate_ranges(random, stream, ranges)
    for each in ranges:
        save(stream, 8, each)
    before = [[value.clone() for value in each.state] for each in ranges]
    params = [
        torch.empty(0)
        if each.param is None
        else each.param.clone()
        if each.offsets[2] < 0
        else each.param[:0]
        for each in ranges
    ]
    step(stream, ranges, params, torch.tensor(scale), counters())
    for each, output, old in zip(ranges, params, before, strict=True):
        each.step_in_memory(torch.tensor(scale))
        stored = [(each.offsets[0], each.state)]
        if each.target >= 0:
            stored = [(each.offsets[0], old), (each.target, each.state)]
        for offset, state in stored:
            found = [torch.full_like(value, 77) for value in state]
            arguments = (offset, each.elements, 0, each.elements, [*range(len(found))])
            ops.state_stream_read_(stream, *arguments, found, counters())
            for value, wanted in zip(found, state, strict=True):
                assert torch.equal(value.view(torch.uint8), wanted.view(torch.uint8))
        if each.param is not None:
            if each.offsets[2] >= 0:
                output = raw_read(8, each.offsets[2], each.param)
            assert torch.equal(output, each.param)
    ops.state_stream_close(8)
    ops.state_stream_close(stream)


def test_counts_what_it_moves_and_allocates_once(store: int, generator: torch.Generator) -> None:
    before = ops.host_buffer_bytes()
    stream = open_stream(store, 2 * SMALLEST_RING)
    assert ops.host_buffer_bytes() == before + 2 * SMALLEST_RING
    elements = 30_001
    each = random_range(Random(generator.initial_seed()), elements, torch.float32, [torch.bfloat16])
    each.bounds, each.rows = [(0, elements)], [[1e-2, 0.9, 0.99, 1e-8, 0.1, 1, 1, 0]]
    each.offsets[0] = ALIGNMENT
    filled = counters()
    ops.state_stream_fill_(stream, ALIGNMENT, each.state[0], filled)
    extent = ops.state_stream_extent_bytes(stream, elements)
    assert filled[:4].tolist() == [0, extent, 0, extent - 12 * elements]
    count = counters()
    for _ in range(3):
        step(stream, [each], [torch.empty(0)], torch.tensor(1.0), count)
    padding = extent - 12 * elements
    assert 0 <= padding < ALIGNMENT
    assert count[:4].tolist() == [3 * extent, 3 * extent, 3 * padding, 3 * padding]
    assert (count[4:] >= 0).all() and count[6] > 0
    assert ops.host_buffer_bytes() == before + 2 * SMALLEST_RING
    ops.state_stream_close(stream)
    assert ops.host_buffer_bytes() == before


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_fill_and_ranges(store: int, generator: torch.Generator, dtype: torch.dtype) -> None:
    stream = open_stream(store, SMALLEST_RING, torch.bfloat16)
    elements = 3 * ops.state_stream_chunk_elements(stream) + 77
    source = torch.randn(elements, generator=generator).to(dtype)
    ops.state_stream_fill_(stream, 0, source, counters())
    model = [source.float(), torch.zeros(elements).bfloat16(), torch.zeros(elements).bfloat16()]
    random = Random(generator.initial_seed())
    for _ in range(20):
        begin, end = sorted(random.choices(range(elements + 1), k=2))
        fields = random.sample(range(3), random.randint(0, 3))
        values = [torch.randn(end - begin, generator=generator).to(model[i].dtype) for i in fields]
        ops.state_stream_write_(stream, 0, elements, begin, end, fields, values, counters())
        for i, value in zip(fields, values, strict=True):
            model[i][begin:end] = value
        begin, end = sorted(random.choices(range(elements + 1), k=2))
        found = [torch.full_like(model[i][begin:end], float("nan")) for i in fields]
        ops.state_stream_read_(stream, 0, elements, begin, end, fields, found, counters())
        for i, value in zip(fields, found, strict=True):
            assert torch.equal(value, model[i][begin:end])
    ops.state_stream_close(stream)


@pytest.mark.parametrize("writing", [False, True])
def test_a_failed_transfer_is_named_and_the_stream_lives_on(
    store: int, generator: torch.Generator, writing: bool
) -> None:
    stream = open_stream(store, SMALLEST_RING)
    each = random_range(Random(generator.initial_seed()), 50_000, torch.float32, [torch.float32])
    each.bounds, each.rows = [(0, 50_000)], [[1e-2, 0.9, 0.99, 1e-8, 0.1, 1, 1, 0]]
    each.offsets[0] = 0
    save(stream, stream, each)
    ops.store_inject_fault(store, writing, 5, -errno.EIO, 1)
    with pytest.raises(RuntimeError, match=r"(first|second).*Input/output error"):
        step(stream, [each], [torch.empty(0)], torch.tensor(1.0), counters())
    save(stream, stream, each)
    step(stream, [each], [torch.empty(0)], torch.tensor(1.0), counters())
    each.step_in_memory(torch.tensor(1.0))
    found = [torch.full_like(value, 77) for value in each.state]
    ops.state_stream_read_(stream, 0, 50_000, 0, 50_000, [0, 1, 2], found, counters())
    for value, wanted in zip(found, each.state, strict=True):
        assert torch.equal(value, wanted)
    ops.state_stream_close(stream)


def test_small_rings_and_impossible_fields_are_refused(store: int) -> None:
    before = ops.host_buffer_bytes()
    with pytest.raises(
        RuntimeError, match=rf"staging_buffer_bytes: .*at least {SMALLEST_RING}.*got {SMALLEST_RING - 1}"
    ):
        open_stream(store, SMALLEST_RING - 1)
    with pytest.raises(RuntimeError, match="got 0 bytes for every 1 elements"):
        ops.state_stream_open(HANDLE, store, 1 << 20, (4, 0), (1, 1))
    with pytest.raises(RuntimeError, match="expected at least one field, got none"):
        ops.state_stream_open(HANDLE, store, 1 << 20, (), ())
    with pytest.raises(RuntimeError, match="one entry for each of the 2 fields of field_bytes, got 1"):
        ops.state_stream_open(HANDLE, store, 1 << 20, (4, 4), (1,))
    with pytest.raises(RuntimeError, match=f"handle {HANDLE} is not open"):
        ops.state_stream_chunk_elements(HANDLE)
    assert ops.host_buffer_bytes() == before


def test_bad_ranges_are_refused(store: int) -> None:
    stream = open_stream(store, SMALLEST_RING)
    read, write = ops.state_stream_read_, ops.state_stream_write_
    values = torch.zeros(10)
    three = torch.zeros(3, dtype=torch.int64)
    wrong: list[tuple[str, tuple[Any, ...]]] = [
        (r"elements: .*\[0, 10\), got \[5, 15\)", (0, 10, 5, 15, [0], [values], counters())),
        ("expected 36 bytes for field 1 of 9 .* got 40", (0, 10, 0, 9, [1], [values], counters())),
        (r"fields\[1\]: .* at most once, got 1", (0, 10, 0, 10, [1, 1], [values, values], counters())),
        (r"fields\[0\]: .*got 3", (0, 10, 0, 10, [3], [values], counters())),
        ("tensors: expected one for each of 1 fields, got 0", (0, 10, 0, 10, [0], [], counters())),
        ("a contiguous tensor", (0, 10, 0, 10, [0], [torch.zeros(20)[::2]], counters())),
        ("multiple of", (1, 10, 0, 10, [0], [values], counters())),
        ("'counters'", (0, 10, 0, 10, [0], [values], three)),
    ]
    for access, (message, arguments) in itertools.product((read, write), wrong):
        with pytest.raises(RuntimeError, match=message):
            access(stream, *arguments)
    ops.state_stream_close(stream)


def test_bad_steps_are_refused(store: int) -> None:
    stream = open_stream(store, SMALLEST_RING)
    hyper = torch.tensor([[1e-3, 0.9, 0.999, 1e-8, 0.1, 1, 1, 0]], dtype=torch.float64)
    count = counters()

    def refused(match: str, ranges: list[list[int]], bounds: list[list[int]], **overrides: object) -> None:
        grads = [torch.zeros(max(each[0], 0)) for each in ranges]
        arguments: dict[str, object] = {
            "ranges": torch.tensor(ranges),
            "params": [torch.empty(0)] * len(ranges),
            "grads": grads,
            "segments": torch.tensor(bounds, dtype=torch.int64).reshape(-1, 2),
            "hyper": hyper.repeat(len(bounds), 1),
            "grad_scale": torch.tensor(1.0),
            "counters": count,
        } | overrides
        with pytest.raises(RuntimeError, match=match):
            ops.state_stream_adam_(stream, **arguments)  # type: ignore[arg-type]

    good = [10, 0, -1, -1, 1, -1]
    refused(r"range 0: segments\[0\]: .*got \[0, 11\)", [good], [[0, 11]])
    refused(r"expected shape \[R, 6\]", [[10, 0, -1, -1, 1]], [[0, 10]])
    refused("each of the 1 segments of ranges", [good], [[0, 5], [5, 10]])
    refused("at least 0 segments, got -1", [[10, 0, -1, -1, -1, -1]], [])
    refused("overlap", [good, good], [[0, 10], [0, 10]])
    refused("overlap", [[10, 0, -1, -1, 1, 0]], [[0, 10]])
    refused("multiple of", [[10, 100, -1, -1, 1, -1]], [[0, 10]])
    refused("at least 0 elements, got -10", [[-10, 0, -1, -1, 0, -1]], [], grads=[torch.empty(0)])
    refused("one of each for 1 ranges, got 2 and 1", [good], [[0, 10]], params=[torch.empty(0)] * 2)
    refused(r"grads\[0\]': .*got shape \[9\]", [good], [[0, 10]], grads=[torch.zeros(9)])
    refused(r"params\[0\]': .*got shape \[9\]", [good], [[0, 10]], params=[torch.zeros(9)])
    refused(r"grads\[0\]': .*got shape \[10\]", [[10, 0, 8192, -1, 1, -1]], [[0, 10]])
    shared = torch.zeros(10)
    refused("expected its own memory", [good], [[0, 10]], params=[shared], grads=[shared])
    assert not count.any()
    ops.state_stream_open(HANDLE, store, 1 << 20, (4, 4), (1, 1))
    refused("not those of Adam", [good], [[0, 10]])
    ops.state_stream_close(stream)
