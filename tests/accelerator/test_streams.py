"""Streams and events: work is late unless somebody waits, and in order if somebody does."""

from __future__ import annotations

import pytest
import torch

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World

NUMEL = 1000


def values(world: World, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(world.seed)
    return torch.randn(NUMEL, generator=generator).to(dtype)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory()


@on_ranks(1, stand_in=True)
def test_it_is_the_accelerator(world: World) -> None:
    assert torch.accelerator.current_accelerator() == torch.device("stand_in")
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 2
    stream = torch.accelerator.current_stream()
    assert stream.device.type == "stand_in"
    side = torch.Stream(device="stand_in")
    assert side != stream
    with side:
        assert torch.accelerator.current_stream() == side
    assert torch.accelerator.current_stream() == stream
    torch.accelerator.set_stream(side)
    assert torch.accelerator.current_stream() == side
    torch.accelerator.set_stream(stream)
    with torch.device("stand_in"):
        assert torch.zeros(1).device == torch.device("stand_in", 0)
    assert torch.zeros(1, device="stand_in:1").device.index == 1


@pytest.mark.parametrize("direction", ["to the device", "to the host", "on the device"])
@on_ranks(1, stand_in=True)
def test_without_a_wait_there_is_poison(world: World, direction: str) -> None:
    torch.stand_in.set_schedule("lazy")
    wanted = values(world)
    source = pinned(wanted) if direction == "to the device" else wanted.to("stand_in")
    into = pinned(torch.zeros(NUMEL)) if direction == "to the host" else torch.zeros(NUMEL, device="stand_in")
    side = torch.Stream(device="stand_in")
    torch.accelerator.synchronize()
    with side:
        into.copy_(source, non_blocking=True)
        arrived = side.record_event()
    if direction == "to the host":
        assert into.isnan().all()
        assert not arrived.query()
        arrived.synchronize()
        assert torch.equal(into, wanted)
    else:
        assert (into + 1).isnan().all()
        torch.accelerator.current_stream().wait_event(arrived)
        assert torch.equal((into + 1).cpu(), wanted + 1)
    assert arrived.query()


@pytest.mark.parametrize("schedule", ["eager", "random", "lazy"])
@on_ranks(1, stand_in=True)
def test_with_waits_there_are_values(world: World, schedule: str) -> None:
    """Chunks through a ring of two: up on one stream, computed with on the current one, down on a third."""
    torch.stand_in.set_schedule(schedule, world.seed)
    up, down = torch.Stream(device="stand_in"), torch.Stream(device="stand_in")
    current = torch.accelerator.current_stream()
    chunks = [values(world)[index * 100 : index * 100 + 100] for index in range(10)]
    sources = [pinned(chunk) for chunk in chunks]
    results = [pinned(torch.zeros(100)) for _ in chunks]
    ring = [torch.zeros(100, device="stand_in") for _ in range(2)]
    free: list[torch.Event | None] = [None, None]
    up.wait_stream(current)
    for index, source in enumerate(sources):
        slot = index % 2
        with up:
            if (event := free[slot]) is not None:
                up.wait_event(event)
            ring[slot].copy_(source, non_blocking=True)
        current.wait_stream(up)
        ring[slot].mul_(2)
        down.wait_stream(current)
        with down:
            results[index].copy_(ring[slot], non_blocking=True)
            free[slot] = down.record_event()
    down.synchronize()
    for chunk, result in zip(chunks, results, strict=True):
        assert torch.equal(result, chunk * 2)


@pytest.mark.parametrize("written", ["new", "in place"])
@on_ranks(1, stand_in=True)
def test_results_are_late_too(world: World, written: str) -> None:
    """A side stream that does not wait for the op gets poison; so does an op on another stream."""
    torch.stand_in.set_schedule("lazy")
    wanted = values(world) + 1
    results, downs = [], [pinned(torch.zeros(NUMEL)) for _ in range(2)]
    side = torch.Stream(device="stand_in")
    for wait, down in zip((False, True), downs, strict=True):
        source = values(world).to("stand_in")
        result = source + 1 if written == "new" else source.add_(1)
        if wait:
            side.wait_stream(torch.accelerator.current_stream())
        with side:
            results.append(result * 1)
            down.copy_(result, non_blocking=True)
            side.synchronize()
    assert results[0].isnan().all() and downs[0].isnan().all()
    assert torch.equal(results[1].cpu(), wanted) and torch.equal(downs[1], wanted)


@on_ranks(1, stand_in=True)
def test_a_source_overwritten_too_early_is_seen(world: World) -> None:
    torch.stand_in.set_schedule("lazy")
    source = pinned(values(world))
    side = torch.Stream(device="stand_in")
    into = torch.empty(NUMEL, device="stand_in")
    with side:
        into.copy_(source, non_blocking=True)
    source.zero_()
    torch.accelerator.synchronize()
    assert not into.any()


@on_ranks(1, stand_in=True)
def test_queued_work_has_the_values_of_its_time(world: World) -> None:
    """A buffer is read down and written again on one stream: the order is the stream's, without waits."""
    torch.stand_in.set_schedule("lazy")
    first, second = values(world), values(world) + 1
    buffer = first.to("stand_in")
    down = pinned(torch.zeros(NUMEL))
    side = torch.Stream(device="stand_in")
    with side:
        down.copy_(buffer, non_blocking=True)
        buffer.copy_(pinned(second), non_blocking=True)
    side.synchronize()
    assert torch.equal(down, first)
    assert torch.equal(buffer.cpu(), second)


@on_ranks(1, stand_in=True)
def test_copies_convert_and_follow_strides(world: World) -> None:
    wanted = values(world).view(20, 50)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        down = torch.empty(50, 20, dtype=dtype, pin_memory=True)
        up = wanted.to("stand_in", dtype)
        down.copy_(up.t(), non_blocking=True)
        torch.accelerator.synchronize()
        assert torch.equal(down, wanted.t().to(dtype))
        rows = torch.zeros(20, 100, dtype=dtype, device="stand_in")
        rows[:, ::2] = wanted.to("stand_in")
        assert torch.equal(rows.cpu()[:, ::2], wanted.to(dtype))
        assert not rows[:, 1::2].any()
    assert torch.equal(
        torch.ones(3, 4, device="stand_in").copy_(torch.arange(4.0)).cpu()[2], torch.arange(4.0)
    )


@on_ranks(1, stand_in=True)
def test_a_blocking_copy_waits(world: World) -> None:
    torch.stand_in.set_schedule("lazy")
    wanted = values(world)
    side = torch.Stream(device="stand_in")
    with side:
        there = pinned(wanted).to("stand_in", non_blocking=True)
        assert torch.equal(there.cpu(), wanted)
        assert there[3].item() == wanted[3].item()
    assert side.query()


@on_ranks(1, stand_in=True)
def test_a_polled_event_comes(world: World) -> None:
    torch.stand_in.set_schedule("lazy")
    side = torch.Stream(device="stand_in")
    source = pinned(values(world))
    with side:
        source.to("stand_in", non_blocking=True)
    event = torch.Event("stand_in", enable_timing=True)
    event.record(side)
    while not event.query():
        pass
    later = torch.Event("stand_in", enable_timing=True)
    later.record(side)
    assert event.elapsed_time(later) >= 0
