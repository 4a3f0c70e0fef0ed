"""State on NVMe chunk by chunk: what comes and is kept, what is under way meanwhile, what a failure does."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from unittest import mock

import pytest
import torch

from zero_ext import ops
from zero_ext.config import AioConfig, OffloadConfig
from zero_ext.config.buffer_sizes import CHUNK_BUFFERS
from zero_ext.offload import MASTER, NvmeState, StateChunk, StateField, TierManager, visit_chunks
from zero_ext.offload.nvme import nvme_store
from zero_ext.offload.nvme.nvme_state_stream import StateStream

SIZES = (70_001, 3, 30_000)  # of the first range four chunks
KINDS = {"momentum": StateField(torch.float32)}


def chunks_of(
    stream: StateStream, ranges: Mapping[int, Sequence[tuple[int, int]]] = MappingProxyType({})
) -> Callable[[Sequence[tuple[int, NvmeState]]], Generator[StateChunk]]:
    """Visits chunks through buffers of its own."""
    buffers = [ops.host_buffer(stream.chunk_bytes) for _ in range(CHUNK_BUFFERS)]
    return lambda states: visit_chunks(stream, states, buffers, ranges=ranges)


@pytest.fixture
def states(tmp_path: Path) -> Iterator[list[tuple[int, NvmeState]]]:
    """Three ranges with random values, under indices 5, 6 and 7."""
    policy = OffloadConfig(optimizer="nvme", nvme_paths=(str(tmp_path),), staging_buffer_bytes=1 << 20)
    tiers = TierManager(policy, AioConfig(), {}, {"": KINDS})
    tiers.reserve(sum(tiers.stored_state_bytes("nvme", numel) for numel in SIZES))
    made = []
    for index, numel in enumerate(SIZES, 5):
        state = tiers.allocate_optimizer_state("nvme", numel, None)
        assert isinstance(state, NvmeState)
        state.write_kinds([MASTER, "momentum"], 0, numel, [torch.randn(numel), torch.randn(numel)])
        made.append((index, state))
    yield made
    tiers.store.close()


def full(states: list[tuple[int, NvmeState]]) -> list[list[torch.Tensor]]:
    return [state.read_kinds([MASTER, "momentum"], 0, state.numel) for _, state in states]


def test_every_chunk_comes_once_and_only_what_changed_is_written(
    states: list[tuple[int, NvmeState]],
) -> None:
    stream = states[0][1].stream

    chunks = chunks_of(stream)
    assert CHUNK_BUFFERS * stream.chunk_bytes < stream.staging_buffer_bytes
    before, seen = full(states), []
    wanted = [[values.clone() for values in kinds] for kinds in before]
    for number, chunk in enumerate(chunks(states)):
        seen.append((chunk.index, chunk.begin, chunk.end))
        for kind, values in zip((MASTER, "momentum"), before[chunk.index - 5], strict=True):
            assert torch.equal(chunk.values[kind], values[chunk.begin : chunk.end])
        chunk.values[MASTER].mul_(2)
        chunk.changed = number % 2 == 0
        if chunk.changed:
            wanted[chunk.index - 5][0][chunk.begin : chunk.end] *= 2
    assert seen == [(index, *span) for index, state in states for span in state.spans()] and len(seen) > 5
    for found, right in zip(full(states), wanted, strict=True):
        assert all(torch.equal(*pair) for pair in zip(found, right, strict=True))


def test_only_chunks_with_a_range_come(states: list[tuple[int, NvmeState]]) -> None:
    """Of the first state two ranges, the first of them over the end of a chunk, of the second one none, and
    all of the third."""
    stream = states[0][1].stream
    size = stream.chunk_elements
    ranges = {5: [(size - 1, size + 1), (3 * size, 3 * size + 1)], 6: []}
    spans = list(states[0][1].spans())
    expected = [(5, *spans[number]) for number in (0, 1, 3)]
    expected += [(7, *span) for span in states[2][1].spans()]
    seen = [(chunk.index, chunk.begin, chunk.end) for chunk in chunks_of(stream, ranges)(states)]
    assert seen == expected and len(spans) > 3


def test_state_with_a_shadow_is_written_in_full_and_can_be_rolled_back(
    states: list[tuple[int, NvmeState]],
) -> None:
    stream = states[0][1].stream
    store, numel = stream.store, 70_001
    store.reserve(store.facts().capacity + 2 * stream.extent_bytes(numel))
    state = NvmeState(stream, numel, shadow=True)
    state.write_kinds([MASTER, "momentum"], 0, numel, [torch.randn(numel), torch.randn(numel)])
    moved = [(0, state)]
    before, chunks = full(moved), chunks_of(stream)
    for committed in (False, True):
        state.snapshot()
        for chunk in chunks(moved):
            if chunk.begin:
                chunk.values[MASTER].mul_(2)
                chunk.changed = True
            else:
                first = chunk.end
        (state.commit if committed else state.rollback)()
        before[0][0][first:] *= 2 if committed else 1
        assert all(torch.equal(*pair) for pair in zip(full(moved)[0], before[0], strict=True))


def test_reads_run_ahead_and_writes_behind(states: list[tuple[int, NvmeState]]) -> None:
    stream, log = states[0][1].stream, []

    def noted(name: str, real: object) -> object:
        return lambda *arguments: (log.append(name), real(*arguments))[1]  # type: ignore[operator]

    with (
        mock.patch.object(ops, "store_read_", noted("read", ops.store_read_)),
        mock.patch.object(ops, "store_write", noted("write", ops.store_write)),
        mock.patch.object(nvme_store.ops, "store_wait", noted("wait", ops.store_wait)),
    ):
        for chunk in chunks_of(stream)(states[:1]):
            log.append("work")
            chunk.changed = True
    first = ["read", "read", "wait", "work", "write", "read", "wait", "work", "write"]
    assert log[: len(first)] == first  # the first write is waited for when its buffer is needed again
    assert log[len(first) : len(first) + 4] == ["wait", "read", "wait", "work"]
    assert log.count("wait") == log.count("read") + log.count("write")


@pytest.mark.parametrize("writing", [False, True])
@pytest.mark.parametrize("number", [0, 2])
def test_a_failed_transfer_is_raised_and_none_is_left_in_flight(
    states: list[tuple[int, NvmeState]], writing: bool, number: int
) -> None:
    stream = states[0][1].stream
    chunks = chunks_of(stream)
    ops.store_inject_fault(stream.store.handle, writing, number, -errno.EIO, 1)
    with pytest.raises(RuntimeError, match="Input/output error"):
        for chunk in chunks(states):
            chunk.changed = True
    assert sum(1 for _ in chunks(states)) > 5  # waits for nothing of the failed pass


def test_a_pass_may_be_broken_off(states: list[tuple[int, NvmeState]]) -> None:
    chunks, before = chunks_of(states[0][1].stream), full(states)
    with contextlib.suppress(ZeroDivisionError), contextlib.closing(chunks(states)) as visited:
        for chunk in visited:
            chunk.values[MASTER].zero_()
            raise ZeroDivisionError
    for found, right in zip(full(states), before, strict=True):
        assert all(torch.equal(*pair) for pair in zip(found, right, strict=True))
