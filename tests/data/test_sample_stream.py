"""Every sample exactly once an epoch, whatever happens to world size and batch size on the way."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from zero_ext.data.sample_stream import Position, SampleStream
from zero_ext.data.shuffle import EpochOrder


def deal(stream: SampleStream, position: Position) -> list[int]:
    """What all ranks together get of the global micro-batch at `position`, in rank order."""
    return [index for rank in range(stream.world_size) for index in stream.indices(position, rank)]


segments = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 12)), min_size=1, max_size=8
)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 99), st.booleans(), segments)
def test_changes_of_world_size_repeat_and_skip_nothing(
    samples: int, seed: int, shuffle: bool, segments: list[tuple[int, int, int]]
) -> None:
    order = EpochOrder(samples, seed, shuffle)
    position, consumed = Position(0, 0), list[int]()
    for world_size, micro_batch_size, batches in segments:
        stream = SampleStream(order, micro_batch_size, world_size, drop_last=False)
        position = stream.normalized(*position)
        for _ in range(batches):
            consumed += deal(stream, position)
            position = stream.after(position)
    assert position == (len(consumed) // samples, len(consumed) % samples)
    for epoch in range(len(consumed) // samples + 1):
        of_epoch = consumed[epoch * samples : (epoch + 1) * samples]
        assert of_epoch == order.indices(epoch, 0, samples)[: len(of_epoch)]


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 99), segments)
def test_drop_last_leaves_out_less_than_a_global_batch_and_repeats_nothing(
    samples: int, seed: int, segments: list[tuple[int, int, int]]
) -> None:
    order = EpochOrder(samples, seed, True)
    position = Position(0, 0)
    consumed: dict[int, list[int]] = {}
    largest = 0
    for world_size, micro_batch_size, batches in segments:
        if world_size * micro_batch_size > samples:
            continue
        stream = SampleStream(order, micro_batch_size, world_size, drop_last=True)
        largest = max(largest, stream.global_batch)
        position = stream.normalized(*position)
        for _ in range(batches):
            consumed.setdefault(position.epoch, []).extend(deal(stream, position))
            position = stream.after(position)
    for epoch, indices in consumed.items():
        assert max(Counter(indices).values()) == 1
        if epoch < position.epoch:
            assert samples - len(indices) < largest


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_length_is_the_number_of_batches_from_the_first_sample(
    samples: int, world_size: int, micro_batch_size: int, drop_last: bool
) -> None:
    if drop_last and world_size * micro_batch_size > samples:
        return
    stream = SampleStream(EpochOrder(samples, 0, True), micro_batch_size, world_size, drop_last)
    position, counted = Position(0, 0), 0
    while position.epoch == 0:
        position, counted = stream.after(position), counted + 1
    assert counted == stream.batches
