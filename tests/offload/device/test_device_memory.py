"""Copies between host and device run late, in order, and everybody waits for what is theirs."""

from __future__ import annotations

import gc
import tempfile
import threading
from unittest import mock

import pytest
import torch

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.config import AioPolicy, OffloadPolicy, Tier
from zero_ext.offload import HERE, Device, MemoryHome, Tiers, TransferLog

COUNT = 5000


def device_and_data(world: World, schedule: str = "lazy") -> tuple[Device, torch.Tensor, torch.Tensor]:
    """A device whose streams do nothing before somebody waits, and values there and in pinned memory."""
    torch.get_device_module("stand_in").set_schedule(schedule, world.seed)
    device = Device(torch.device("stand_in", 0))
    there, here = (device.allocate(tier, COUNT, torch.float32) for tier in ("device", "host"))
    here.uniform_()
    there.copy_(torch.rand(COUNT))
    return device, there, here


@on_ranks(1, stand_in=True)
def test_memory_is_zeroed_and_pinned_in_exactly_its_size(world: World) -> None:
    accelerator = torch.get_device_module("stand_in")
    device, before = Device(torch.device("stand_in", 0)), accelerator.pinned_bytes()
    for dtype, numel in ((torch.float32, 12345), (torch.bfloat16, 7), (torch.uint8, 0)):
        host, own = (device.allocate(tier, numel, dtype) for tier in ("host", "device"))
        assert host.device.type == "cpu" and own.device == device.device
        assert not host.any() and not own.cpu().any()
        assert accelerator.pinned_bytes() - before == numel * dtype.itemsize
        part = host[: numel // 2]
        del host
        assert accelerator.pinned_bytes() - before == numel * dtype.itemsize  # a view keeps it
        del part
        gc.collect()
        assert accelerator.pinned_bytes() == before
    with pytest.raises(AssertionError, match="storage is no memory"):
        device.allocate("nvme", 1, torch.float32)


@on_ranks(1, stand_in=True)
def test_a_copy_comes_after_what_the_current_stream_was_given(world: World) -> None:
    device, there, here = device_and_data(world)
    fresh, old = torch.rand(COUNT), there.cpu()
    other = torch.empty_like(there)
    source = fresh.to("stand_in")
    there.copy_(source)  # late, as all copies on the device
    device.copy(here, there).wait()
    assert torch.equal(here, fresh)
    other.copy_(there)
    down = other.cpu()
    there.copy_(old)
    other.copy_(there)  # late: reads what is there before the copy from the host replaces it
    with device.copy(there, here).followed():
        assert torch.equal(there.cpu(), fresh)
    assert torch.equal(other.cpu(), old) and torch.equal(there.cpu(), fresh) and torch.equal(down, fresh)


@on_ranks(1, stand_in=True)
def test_a_copy_may_begin_before_what_came_later(world: World) -> None:
    device, there, here = device_and_data(world, "eager")
    after = device.now()
    late = torch.Stream(device="stand_in")
    torch.get_device_module("stand_in").set_schedule("lazy")
    with late:
        blocked = torch.empty_like(there)
        blocked.copy_(there)
    torch.accelerator.current_stream().wait_event(late.record_event())
    arrival = device.copy(there, here, after)
    with arrival.followed() as _:
        assert torch.equal(there.cpu(), here)  # although the current stream of outside waits for ``late``


@on_ranks(1, stand_in=True)
def test_two_threads_copy_at_once_and_each_goes_back_to_its_own_stream(world: World) -> None:
    """A delayed update copies beside the forward: here one thread begins a copy inside the other's."""
    device, there, here = device_and_data(world, "random")
    other_here, other_there = here.clone(), there.clone()
    own, copies = torch.Stream(device="stand_in"), torch.Tensor.copy_
    inside, ended, found = threading.Event(), threading.Event(), []

    def late_copy(into: torch.Tensor, *arguments: object, **more: object) -> torch.Tensor:
        if threading.current_thread() is not thread:
            thread.start()
            inside.wait(20)  # the first copy goes on while the second one has begun
        else:
            inside.set()
            ended.wait(20)
        return copies(into, *arguments, **more)

    def copy_beside() -> None:
        with own:
            device.copy(other_there, other_here).wait()
            found.append(torch.accelerator.current_stream().stream_id)

    thread = threading.Thread(target=copy_beside)
    before = torch.accelerator.current_stream().stream_id
    with mock.patch.object(torch.Tensor, "copy_", late_copy):
        arrival = device.copy(there, here)
        after = torch.accelerator.current_stream().stream_id
        ended.set()
        thread.join()
    arrival.wait()
    assert (before, own.stream_id) == (after, *found) and before != own.stream_id
    torch.accelerator.synchronize()
    assert torch.equal(there.cpu(), here) and torch.equal(other_there.cpu(), other_here)


@on_ranks(1, stand_in=True)
def test_who_owns_memory_waits_for_it(world: World) -> None:
    device, there, here = device_and_data(world)
    wanted = there.cpu()
    arrival = device.copy(here, there)
    arrival.let_go()  # the current stream waits, so it may change the source
    there.copy_(torch.zeros(COUNT))
    arrival.wait()
    assert torch.equal(here, wanted)
    arrival = device.copy(there, here)
    arrival.let_go()  # the host waits, so it may change the source
    here.zero_()
    arrival.wait()
    assert torch.equal(there.cpu(), wanted)
    assert device.copy(here, torch.ones(COUNT)) is HERE and here.all()
    with pytest.raises(AssertionError, match=r"no copy from .*float32 on cpu to .*bfloat16"):
        device.copy(there.bfloat16(), here)


@on_ranks(1, stand_in=True)
@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_home_waits_for_its_own_copies(world: World, tier: Tier) -> None:
    device, there, here = device_and_data(world)
    memory, values = (there, here) if tier == "device" else (here, there)
    source: Tier = "host" if tier == "device" else "device"
    home, wanted = MemoryHome(tier, memory, TransferLog(), device), values.cpu().clone()
    home.store(0, values, source)
    assert torch.equal(home.read(0, COUNT).cpu(), wanted)
    into = torch.empty_like(values)
    arrival = home.fetch(into, 0, source)
    home.fetch(torch.empty_like(memory), 0, tier)  # a copy beside it, which is there at once
    home.read(0, COUNT).zero_()  # not before it was read
    arrival.wait()
    assert torch.equal(into.cpu(), wanted)


@on_ranks(1, stand_in=True)
def test_storage_by_way_of_the_host(world: World) -> None:
    """Shards larger than all chunks together, several at once, in both directions."""
    with tempfile.TemporaryDirectory() as folder:
        device, _, _ = device_and_data(world, "random")
        policy = OffloadPolicy(params="nvme", nvme_paths=(folder,))
        tiers = Tiers(policy, AioPolicy(), {}, device=device, transit_bytes=12 * 4096)
        assert tiers.staging_bytes()["host"] == 12 * 4096
        count = 20 * 1024
        tiers.reserve(3 * 4 * count)
        homes = [tiers.stored_home(count, torch.float32) for _ in range(3)]
        values = [torch.rand(count) for _ in homes]
        on_device = [each.to("stand_in") for each in values]
        writes = [home.write(each, 0) for home, each in zip(homes, on_device, strict=True)]
        for write, each in zip(writes, on_device, strict=True):
            write.let_go()
            each.copy_(torch.zeros(count))
        for write in writes:
            write.wait()
        rooms = [torch.zeros(count, device="stand_in") for _ in homes]
        arrivals = [home.fetch(room) for home, room in zip(homes, rooms, strict=True)]
        followed = torch.empty_like(rooms[0])
        torch.get_device_module("stand_in").set_schedule("lazy")
        with arrivals[0].followed():
            followed.copy_(rooms[0])
        torch.accelerator.synchronize()
        assert torch.equal(followed.cpu(), values[0])
        for arrival, room, wanted in zip(arrivals[::-1], rooms[::-1], values[::-1], strict=True):
            arrival.wait()
            assert torch.equal(room.cpu(), wanted)
        count = {("device", "nvme"): 3 * 4 * count, ("nvme", "device"): 3 * 4 * count}
        assert tiers.transfers.moved == count


@on_ranks(1, stand_in=True)
def test_a_failed_transfer_is_told_by_all_who_wait(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        device, _, _ = device_and_data(world, "random")
        policy = OffloadPolicy(params="nvme", nvme_paths=(folder,), checksum=True)
        tiers = Tiers(policy, AioPolicy(), {}, device=device, transit_bytes=12 * 4096)
        tiers.reserve(2 * 80 * 1024)
        good, bad = (tiers.stored_home(20 * 1024, torch.float32) for _ in range(2))
        values = torch.rand(20 * 1024, device="stand_in")
        for home, written in ((good, values), (bad, -values)):
            home.write(written, 0).wait()
        damaged = next(iter(tiers.store.facts().devices)).path
        with open(damaged, "r+b") as file:  # noqa: PTH123
            file.seek(bad.offset + 9 * 4096)
            file.write(b"\xff" * 64)
            file.flush()
        rooms = [torch.zeros_like(values) for _ in range(2)]
        arrivals = [bad.fetch(rooms[0]), good.fetch(rooms[1])]
        arrivals[1].wait()
        assert torch.equal(rooms[1].cpu(), values.cpu())
        for _ in range(2):
            with pytest.raises(RuntimeError, match="CRC32C"):
                arrivals[0].wait()
        with pytest.raises(RuntimeError, match="CRC32C"):
            arrivals[0].followed()
        arrivals[0].let_go()
        torch.get_device_module("stand_in").set_schedule("lazy")
        with pytest.raises(RuntimeError, match="CRC32C"):
            bad.fetch(rooms[0]).followed()
        rooms[0].copy_(rooms[1])  # after the chunks that did come, though nobody waited for them
        assert torch.equal(rooms[0].cpu(), values.cpu())
        torch.accelerator.synchronize()
        assert torch.equal(rooms[0].cpu(), values.cpu())


@on_ranks(1, stand_in=True)
def test_pages_are_unpinned_when_no_copy_uses_them(world: World) -> None:
    device, there, here = device_and_data(world)
    accelerator = torch.get_device_module("stand_in")
    arrival = device.copy(there, here)
    ended = torch.accelerator.current_stream()
    torch.accelerator.current_stream().wait_event(arrival._event)
    event, unpin, found = ended.record_event(), accelerator.host_unregister, []

    def watched(pointer: int) -> None:
        found.append(event.query())  # lazy: true only if somebody waited before
        unpin(pointer)

    with mock.patch.object(accelerator, "host_unregister", watched):
        del here, arrival
        gc.collect()
    assert found == [True]
