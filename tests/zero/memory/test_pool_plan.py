"""Layout of the pool and its arena against what they promise, for random demands."""

from __future__ import annotations

import random

import pytest

from zero_ext.config.buffer_sizes import STORAGE_ALIGNMENT, extent_bytes
from zero_ext.offload.extent_arena import ExtentArena
from zero_ext.plan import slot_pool_bytes
from zero_ext.zero.memory.pool_plan import Demand, plan_pool


def random_demands(source: random.Random) -> list[Demand]:
    demands = []
    for number in range(source.randrange(1, 30)):
        times = sorted(source.sample(range(60), 2 * source.randrange(1, 4)))
        when = tuple(zip(times[::2], times[1::2], strict=True))
        count = source.choice((1, 1, 1, 3))
        demands.append(Demand((f"unit{number}", "gradient"), source.randrange(1, 50_000), when, count))
    return demands


def busiest(demands: list[Demand]) -> int:
    """Bytes needed at the busiest moment: no layout takes less."""
    return max(
        sum(d.extent for d in demands if any(begin <= moment < end for begin, end in d.when))
        for moment in range(60)
    )


def test_demands_that_meet_do_not_overlap() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    for _ in range(20):
        demands = random_demands(source)
        plan = plan_pool(demands)
        assert plan.offsets.keys() == {demand.key for demand in demands}
        for number, demand in enumerate(demands):
            offsets = plan.offsets[demand.key]
            assert len(offsets) == demand.count and offsets.step == extent_bytes(demand.nbytes)
            begin, end = offsets.start, offsets.start + demand.extent
            assert begin % STORAGE_ALIGNMENT == 0 and end <= plan.nbytes
            for other in demands[:number]:
                start = plan.offsets[other.key].start
                assert not demand.meets(other) or end <= start or start + other.extent <= begin
        assert busiest(demands) <= plan.nbytes <= sum(demand.extent for demand in demands)
        one, two, many = (slot_pool_bytes(demands, classes) for classes in (1, 2, 30))
        assert one >= two >= many
        assert one % max(demand.nbytes for demand in demands) == 0


def test_no_demands_need_no_memory() -> None:
    assert plan_pool([]).nbytes == slot_pool_bytes([], 1) == 0


def test_slots_of_a_known_case() -> None:
    always = ((0, 10),)
    demands = [
        Demand(("large", "parameters"), 100, always),
        *(Demand((f"small{number}", "gradient"), 10, always) for number in range(3)),
        Demand(("later", "gradient"), 100, ((10, 11),)),
    ]
    assert slot_pool_bytes(demands, 1) == 400
    assert slot_pool_bytes(demands, 2) == slot_pool_bytes(demands, 3) == 130


def test_the_arena_against_a_list_of_pages() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    pages: list[int | None] = [None] * 64
    arena, live = ExtentArena(len(pages) * STORAGE_ALIGNMENT), dict[int, int]()
    highest = 0
    for number in range(3000):
        if live and source.random() < 0.45:
            offset = source.choice(list(live))
            size = live.pop(offset)
            assert all(page is not None for page in pages[offset // STORAGE_ALIGNMENT :][:size])
            pages[offset // STORAGE_ALIGNMENT : offset // STORAGE_ALIGNMENT + size] = [None] * size
            arena.release(offset)
            continue
        nbytes = source.randrange(1, 12 * STORAGE_ALIGNMENT)
        size = extent_bytes(nbytes) // STORAGE_ALIGNMENT
        wanted = source.randrange(len(pages))
        free = pages[wanted : wanted + size] == [None] * size
        got = arena.allocate(nbytes, range(wanted * STORAGE_ALIGNMENT, wanted * STORAGE_ALIGNMENT + 1))
        gaps = [
            len(run) for run in "".join("x" if page is not None else "." for page in pages).split("x") if run
        ]
        if got is None:
            assert max(gaps, default=0) < size
            continue
        assert got == wanted * STORAGE_ALIGNMENT or not free
        assert pages[got // STORAGE_ALIGNMENT : got // STORAGE_ALIGNMENT + size] == [None] * size
        pages[got // STORAGE_ALIGNMENT : got // STORAGE_ALIGNMENT + size] = [number] * size
        live[got] = size
        highest = max(highest, got + size * STORAGE_ALIGNMENT)
    assert arena.high_water == highest


def test_an_extent_is_released_once() -> None:
    arena = ExtentArena(4 * STORAGE_ALIGNMENT)
    offset = arena.allocate(1)
    assert offset == 0 and arena.allocate(1) == STORAGE_ALIGNMENT
    arena.release(0)
    for wrong in (0, 1, 2 * STORAGE_ALIGNMENT):
        with pytest.raises(KeyError, match=f"no extent starts at {wrong}"):
            arena.release(wrong)
