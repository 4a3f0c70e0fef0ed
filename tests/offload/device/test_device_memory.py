"""Copies between host and device: late, in order, and waited for by the owner of each memory."""

from __future__ import annotations

import gc
import tempfile
import threading
from unittest import mock

import pytest
import torch

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.config import AioConfig, OffloadConfig, Tier
from zero_ext.offload import COMPLETED, Device, MemoryShard, TierManager, TransferStats

COUNT = 5000


def device_and_data(world: World, schedule: str = "lazy") -> tuple[Device, torch.Tensor, torch.Tensor]:
    """A device whose streams do nothing before somebody waits, and values there and in pinned memory."""
    torch.get_device_module("stand_in").set_schedule(schedule, world.seed)
    device = Device(torch.device("stand_in", 0))
    device_values, host_values = (device.allocate(tier, COUNT, torch.float32) for tier in ("device", "host"))
    host_values.uniform_()
    device_values.copy_(torch.rand(COUNT))
    return device, device_values, host_values


@on_ranks(1, stand_in=True)
def test_memory_is_zeroed_and_pinned_in_exactly_its_size(world: World) -> None:
    accelerator = torch.get_device_module("stand_in")
    device, before = Device(torch.device("stand_in", 0)), accelerator.pinned_bytes()
    for dtype, numel in ((torch.float32, 12345), (torch.bfloat16, 7), (torch.uint8, 0)):
        host, own = (device.allocate(tier, numel, dtype) for tier in ("host", "device"))
        assert host.device.type == "cpu" and own.device == device.device
        assert not host.any() and not own.cpu().any()
        assert accelerator.pinned_bytes() - before == numel * dtype.itemsize
        view = host[: numel // 2]
        del host
        assert accelerator.pinned_bytes() - before == numel * dtype.itemsize  # a view keeps it
        del view
        gc.collect()
        assert accelerator.pinned_bytes() == before
    with pytest.raises(AssertionError, match="storage is no memory"):
        device.allocate("nvme", 1, torch.float32)


@on_ranks(1, stand_in=True)
def test_a_copy_follows_earlier_work_of_the_current_stream(world: World) -> None:
    device, device_values, host_values = device_and_data(world)
    fresh, old = torch.rand(COUNT), device_values.cpu()
    other = torch.empty_like(device_values)
    source = fresh.to("stand_in")
    device_values.copy_(source)  # late, as all copies on the device
    device.copy(host_values, device_values).wait()
    assert torch.equal(host_values, fresh)
    other.copy_(device_values)
    down = other.cpu()
    device_values.copy_(old)
    other.copy_(device_values)  # late: reads what is there before the copy from the host replaces it
    with device.copy(device_values, host_values).stream_context():
        assert torch.equal(device_values.cpu(), fresh)
    assert (
        torch.equal(other.cpu(), old) and torch.equal(device_values.cpu(), fresh) and torch.equal(down, fresh)
    )


@on_ranks(1, stand_in=True)
def test_a_copy_may_begin_before_what_came_later(world: World) -> None:
    device, device_values, host_values = device_and_data(world, "eager")
    after = device.now()
    late = torch.Stream(device="stand_in")
    torch.get_device_module("stand_in").set_schedule("lazy")
    with late:
        blocked = torch.empty_like(device_values)
        blocked.copy_(device_values)
    torch.accelerator.current_stream().wait_event(late.record_event())
    handle = device.copy(device_values, host_values, after)
    with handle.stream_context() as _:
        assert torch.equal(
            device_values.cpu(), host_values
        )  # although the current stream of outside waits for ``late``


@on_ranks(1, stand_in=True)
def test_two_threads_copy_at_once_and_each_goes_back_to_its_own_stream(world: World) -> None:
    """A delayed update copies beside the forward: here one thread begins a copy inside the other's."""
    device, device_values, host_values = device_and_data(world, "random")
    other_host, other_device = host_values.clone(), device_values.clone()
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
            device.copy(other_device, other_host).wait()
            found.append(torch.accelerator.current_stream().stream_id)

    thread = threading.Thread(target=copy_beside)
    before = torch.accelerator.current_stream().stream_id
    with mock.patch.object(torch.Tensor, "copy_", late_copy):
        handle = device.copy(device_values, host_values)
        after = torch.accelerator.current_stream().stream_id
        ended.set()
        thread.join()
    handle.wait()
    assert (before, own.stream_id) == (after, *found) and before != own.stream_id
    torch.accelerator.synchronize()
    assert torch.equal(device_values.cpu(), host_values) and torch.equal(other_device.cpu(), other_host)


@on_ranks(1, stand_in=True)
def test_who_owns_memory_waits_for_it(world: World) -> None:
    device, device_values, host_values = device_and_data(world)
    wanted = device_values.cpu()
    handle = device.copy(host_values, device_values)
    handle.wait_source()  # the current stream waits, so it may change the source
    device_values.copy_(torch.zeros(COUNT))
    handle.wait()
    assert torch.equal(host_values, wanted)
    handle = device.copy(device_values, host_values)
    handle.wait_source()  # the host waits, so it may change the source
    host_values.zero_()
    handle.wait()
    assert torch.equal(device_values.cpu(), wanted)
    assert device.copy(host_values, torch.ones(COUNT)) is COMPLETED and host_values.all()
    with pytest.raises(AssertionError, match=r"no copy from .*float32 on cpu to .*bfloat16"):
        device.copy(device_values.bfloat16(), host_values)


@on_ranks(1, stand_in=True)
@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_shard_waits_for_its_own_copies(world: World, tier: Tier) -> None:
    device, device_values, host_values = device_and_data(world)
    memory, values = (device_values, host_values) if tier == "device" else (host_values, device_values)
    source: Tier = "host" if tier == "device" else "device"
    shard, wanted = MemoryShard(tier, memory, TransferStats(), device), values.cpu().clone()
    shard.store(0, values, source)
    assert torch.equal(shard.read(0, COUNT).cpu(), wanted)
    into = torch.empty_like(values)
    handle = shard.fetch(into, 0, source)
    shard.fetch(torch.empty_like(memory), 0, tier)  # a copy beside it, which is there at once
    shard.read(0, COUNT).zero_()  # not before it was read
    handle.wait()
    assert torch.equal(into.cpu(), wanted)


@on_ranks(1, stand_in=True)
def test_storage_through_the_host(world: World) -> None:
    """Shards larger than all chunks, several simultaneously, in both directions."""
    with tempfile.TemporaryDirectory() as folder:
        device, _, _ = device_and_data(world, "random")
        policy = OffloadConfig(params="nvme", nvme_paths=(folder,))
        tiers = TierManager(policy, AioConfig(), {}, device=device, bounce_buffer_bytes=12 * 4096)
        assert tiers.staging_bytes()["host"] == 12 * 4096
        count = 20 * 1024
        tiers.reserve(3 * 4 * count)
        shards = [tiers.allocate_nvme_shard(count, torch.float32) for _ in range(3)]
        values = [torch.rand(count) for _ in shards]
        on_device = [each.to("stand_in") for each in values]
        writes = [shard.write(each, 0) for shard, each in zip(shards, on_device, strict=True)]
        for write, each in zip(writes, on_device, strict=True):
            write.wait_source()
            each.copy_(torch.zeros(count))
        for write in writes:
            write.wait()
        buffers = [torch.zeros(count, device="stand_in") for _ in shards]
        handles = [shard.fetch(buffer) for shard, buffer in zip(shards, buffers, strict=True)]
        followed = torch.empty_like(buffers[0])
        torch.get_device_module("stand_in").set_schedule("lazy")
        with handles[0].stream_context():
            followed.copy_(buffers[0])
        torch.accelerator.synchronize()
        assert torch.equal(followed.cpu(), values[0])
        for handle, buffer, wanted in zip(handles[::-1], buffers[::-1], values[::-1], strict=True):
            handle.wait()
            assert torch.equal(buffer.cpu(), wanted)
        count = {("device", "nvme"): 3 * 4 * count, ("nvme", "device"): 3 * 4 * count}
        assert tiers.transfers.moved == count


@on_ranks(1, stand_in=True)
def test_every_waiter_raises_the_error_of_a_failed_transfer(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        device, _, _ = device_and_data(world, "random")
        policy = OffloadConfig(params="nvme", nvme_paths=(folder,), checksum=True)
        tiers = TierManager(policy, AioConfig(), {}, device=device, bounce_buffer_bytes=12 * 4096)
        tiers.reserve(2 * 80 * 1024)
        good, bad = (tiers.allocate_nvme_shard(20 * 1024, torch.float32) for _ in range(2))
        values = torch.rand(20 * 1024, device="stand_in")
        for shard, written in ((good, values), (bad, -values)):
            shard.write(written, 0).wait()
        damaged = next(iter(tiers.store.facts().devices)).path
        with open(damaged, "r+b") as file:  # noqa: PTH123
            file.seek(bad.offset + 9 * 4096)
            file.write(b"\xff" * 64)
            file.flush()
        buffers = [torch.zeros_like(values) for _ in range(2)]
        handles = [bad.fetch(buffers[0]), good.fetch(buffers[1])]
        handles[1].wait()
        assert torch.equal(buffers[1].cpu(), values.cpu())
        for _ in range(2):
            with pytest.raises(RuntimeError, match="CRC32C"):
                handles[0].wait()
        with pytest.raises(RuntimeError, match="CRC32C"):
            handles[0].stream_context()
        handles[0].wait_source()
        torch.get_device_module("stand_in").set_schedule("lazy")
        with pytest.raises(RuntimeError, match="CRC32C"):
            bad.fetch(buffers[0]).stream_context()
        buffers[0].copy_(buffers[1])  # after the chunks that did come, though nobody waited for them
        assert torch.equal(buffers[0].cpu(), values.cpu())
        torch.accelerator.synchronize()
        assert torch.equal(buffers[0].cpu(), values.cpu())


@on_ranks(1, stand_in=True)
def test_pages_are_unpinned_when_no_copy_uses_them(world: World) -> None:
    device, device_values, host_values = device_and_data(world)
    accelerator = torch.get_device_module("stand_in")
    handle = device.copy(device_values, host_values)
    ended = torch.accelerator.current_stream()
    torch.accelerator.current_stream().wait_event(handle._event)
    event, unpin, found = ended.record_event(), accelerator.host_unregister, []

    def watched(pointer: int) -> None:
        found.append(event.query())  # lazy: true only if somebody waited before
        unpin(pointer)

    with mock.patch.object(accelerator, "host_unregister", watched):
        del host_values, handle
        gc.collect()
    assert found == [True]
