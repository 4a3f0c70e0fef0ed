"""Bytes between storage and the accelerator by a fake cuFile library, and all that can be wrong with it."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.accelerator.cufile.library import FakeCuFile, fake_cufile
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext import ops
from zero_ext.config import AioConfig, OffloadConfig
from zero_ext.offload import Device, TierManager
from zero_ext.offload.nvme import gpu_direct_storage
from zero_ext.offload.shard_storage import NvmeShard

COUNT = 20 * 1024
TRANSIT = 12 * 4096


@contextlib.contextmanager
def log_lines() -> Iterator[list[str]]:
    """What the module logs inside, with the level."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("zero_ext.offload.nvme.gpu_direct_storage")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@contextlib.contextmanager
def tiers_in(world: World, schedule: str = "random", paths: int = 1, **offload: Any) -> Iterator[TierManager]:
    """Tiers that ask for direct storage, with room for four shards of COUNT."""
    fake_cufile()
    torch.get_device_module("stand_in").set_schedule(schedule, world.seed)
    device = Device(torch.device("stand_in", 0))
    with contextlib.ExitStack() as stack:
        folders = tuple(stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(paths))
        policy = OffloadConfig(params="nvme", nvme_paths=folders, **offload)
        aio = AioConfig(gpu_direct_storage="auto", block_bytes=8192)
        tiers = TierManager(policy, aio, {}, device=device, bounce_buffer_bytes=TRANSIT)
        tiers.reserve(4 * 4 * COUNT)
        try:
            yield tiers
        finally:
            tiers.store.close()


def is_direct(tiers: TierManager) -> bool:
    return tiers.staging_bytes()["host"] == 0


def there_and_back(shard: NvmeShard) -> None:
    """What is written from the device is what it reads, and what the host reads."""
    values = torch.rand(COUNT)
    written = values.to("stand_in")
    shard.write(written, 0).wait_source()
    written.zero_()
    buffer = torch.full((COUNT,), torch.nan, device="stand_in")
    shard.fetch(buffer).wait()
    assert torch.equal(buffer.cpu(), values)
    assert torch.equal(shard.read(0, COUNT), values)


@on_ranks(1, stand_in=True)
@pytest.mark.parametrize("paths", [1, 2])
def test_bytes_go_without_the_host(world: World, paths: int) -> None:
    library, device_module = fake_cufile(), torch.get_device_module("stand_in")
    closed, pinned = library.counts()[:2], device_module.pinned_bytes()
    for schedule in ("random", "lazy"):
        with log_lines() as lines, tiers_in(world, schedule, paths) as tiers:
            assert lines == [
                "INFO aio.gpu_direct_storage 'auto': bytes between NVMe and stand_in:0 go directly, by cuFile"
            ]
            assert is_direct(tiers) and device_module.pinned_bytes() == pinned
            assert library.counts()[:2] == (1, paths)
            shards = [tiers.allocate_nvme_shard(COUNT, torch.float32) for _ in range(4)]
            assert not any(shard.read(0, COUNT).any() for shard in shards)  # after the trial
            before = library.counts()
            for shard in shards:
                there_and_back(shard)
            moved = 4 * 4 * COUNT
            after = library.counts()
            assert after.bytes_read - before.bytes_read == moved == after.bytes_written - before.bytes_written
            assert tiers.transfers.moved == {("device", "nvme"): moved, ("nvme", "device"): moved}
        assert library.counts()[:2] == closed


@on_ranks(1, stand_in=True)
def test_a_transfer_follows_the_order_of_its_stream(world: World) -> None:
    with tiers_in(world, "lazy") as tiers:
        shard = tiers.allocate_nvme_shard(COUNT, torch.float32)
        values, buffer = torch.zeros(COUNT, device="stand_in"), torch.zeros(COUNT, device="stand_in")
        source = torch.rand(COUNT).pin_memory()
        values.copy_(source, non_blocking=True)  # not before somebody waits
        written = shard.write(values, 0)
        written.wait()
        buffer.copy_(torch.ones(COUNT).pin_memory(), non_blocking=True)  # must not come over what is read
        handle, copied = shard.fetch(buffer), torch.empty_like(buffer)
        with handle.stream_context():
            copied.copy_(buffer)
        torch.accelerator.synchronize()
        assert torch.equal(copied.cpu(), source) and torch.equal(buffer.cpu(), source)


@on_ranks(1, stand_in=True)
@pytest.mark.parametrize("call", ["read", "write"])
def test_every_waiter_raises_the_error_of_a_failed_transfer(world: World, call: str) -> None:
    library = fake_cufile()
    with tiers_in(world) as tiers:
        shard, other = (tiers.allocate_nvme_shard(COUNT, torch.float32) for _ in range(2))
        path = str(tiers.store.facts().devices[0].path)
        memory = torch.rand(COUNT, device="stand_in")
        for result, reason in ((-errno.EIO, "Input/output error (errno 5)"), (-5011, "returned -5011")):
            library.fault(call, result, after=1)
            handle = shard.fetch(memory) if call == "read" else shard.write(memory, 0)
            handle.wait_source()
            for _ in range(2):
                with pytest.raises(RuntimeError) as caught:
                    handle.wait()
                text = str(caught.value)
                assert reason in text and path in text, text
                assert f"{'reading' if call == 'read' else 'writing'} 8192 bytes at offset " in text
            with pytest.raises(RuntimeError, match="8192 bytes at offset"):
                handle.stream_context()
            there_and_back(other)
        for result in (-errno.EINTR, 512, 8191):
            library.fault(call, result, after=1, times=2)
            there_and_back(shard)


REFUSALS = {
    "driver_open": "cuFileDriverOpen failed: CUfileOpError 5001, CUresult 0",
    "handle_register": "cuFileHandleRegister of '",
    "read": "cuFileRead returned -5001 (CUfileOpError)",
    "write": "cuFileWrite returned -5001 (CUfileOpError)",
}


@on_ranks(1, stand_in=True)
def test_without_it_bytes_go_through_the_host(world: World) -> None:
    library = fake_cufile()
    closed = library.counts()[:2]
    for call, reason in REFUSALS.items():
        failed = 5001 if call in ("driver_open", "handle_register") else -5001
        library.fault(call, failed)
        with log_lines() as lines, tiers_in(world) as tiers:
            check_the_path_through_the_host(tiers, lines, reason)
            assert library.counts()[:2] == closed
    with log_lines() as lines, tiers_in(world, checksum=True) as tiers:
        check_the_path_through_the_host(tiers, lines, "offload.checksum")
    module = torch.get_device_module("stand_in")
    with (
        mock.patch.object(module, "has_direct_storage", lambda: False),
        log_lines() as lines,
        tiers_in(world) as tiers,
    ):
        check_the_path_through_the_host(tiers, lines, "is for CUDA devices, this is stand_in:0")
    with (
        mock.patch.object(gpu_direct_storage, "MODULES", Path("/proc/no_modules")),
        log_lines() as lines,
        tiers_in(world) as tiers,
    ):
        check_the_path_through_the_host(tiers, lines, "/proc/no_modules does not exist")
    with (
        mock.patch.object(ops, "cufile_unavailable_reason", lambda: "libcufile.so.0: no such file"),
        log_lines() as lines,
        tiers_in(world) as tiers,
    ):
        check_the_path_through_the_host(tiers, lines, "libcufile.so.0: no such file")


def check_the_path_through_the_host(tiers: TierManager, lines: list[str], reason: str) -> None:
    assert tiers.staging_bytes()["host"] == TRANSIT
    (line,) = lines
    assert line.startswith("WARNING ") and "go through pinned host memory: " in line and reason in line
    shards = [tiers.allocate_nvme_shard(COUNT, torch.float32) for _ in range(2)]
    before = fake_cufile().counts()
    for shard in shards:
        assert not shard.read(0, COUNT).any()
        there_and_back(shard)
    assert fake_cufile().counts() == before
    with pytest.raises(AssertionError, match="it goes through the host's"):
        tiers.store.read(shards[0].offset, torch.zeros(COUNT, device="stand_in"))


@on_ranks(1, stand_in=True)
def test_a_library_that_moves_other_bytes_is_not_used(world: World) -> None:
    """The trial sees what no status tells: here reads and writes that go elsewhere in the file."""
    for name, words in (("store_write_direct", "wrote"), ("store_read_direct_", "read")):
        real = getattr(ops, name)

        def elsewhere(handle: int, tensor: torch.Tensor, offset: int, ticket: int, real: Any = real) -> None:
            real(handle, tensor[: tensor.numel() - 4096], offset + 4096, ticket)

        with mock.patch.object(ops, name, elsewhere), log_lines() as lines, tiers_in(world) as tiers:
            check_the_path_through_the_host(tiers, lines, f"cuFile {words} other bytes")


@on_ranks(1, stand_in=True)
def test_nobody_asks_for_it_by_default(world: World) -> None:
    library: FakeCuFile = fake_cufile()
    before = library.counts()
    with tempfile.TemporaryDirectory() as folder, log_lines() as lines:
        policy = OffloadConfig(params="nvme", nvme_paths=(folder,))
        device = Device(torch.device("stand_in", 0))
        tiers = TierManager(policy, AioConfig(), {}, device=device, bounce_buffer_bytes=TRANSIT)
        assert tiers.staging_bytes()["host"] == TRANSIT and not lines
        del tiers
        gc.collect()
    assert library.counts() == before


@on_ranks(1, stand_in=True)
def test_many_at_once(world: World) -> None:
    with tiers_in(world, "random", 2) as tiers:
        shards = [tiers.allocate_nvme_shard(COUNT, torch.float32) for _ in range(4)]
        values = [torch.rand(COUNT, device="stand_in") for _ in shards]
        writes = [shard.write(each, 0) for shard, each in zip(shards, values, strict=True)]
        for write in reversed(writes):
            write.wait()
        buffers = [torch.zeros(COUNT, device="stand_in") for _ in shards]
        reads = [shard.fetch(buffer) for shard, buffer in zip(shards, buffers, strict=True)]
        for read, buffer, wanted in itertools.islice(zip(reads, buffers, values, strict=True), 1, None):
            read.wait()
            assert torch.equal(buffer.cpu(), wanted.cpu())
        del reads, read, tiers  # one of them nobody waited for
        gc.collect()
