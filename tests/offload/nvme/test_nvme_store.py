"""NvmeStore against a dict of bytes, and what it does when devices, space or processes fail it."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint.full_disk import CAPACITY, limit_file_size, mount_small
from zero_ext import ops
from zero_ext.offload import NvmeStore
from zero_ext.offload.nvme import nvme_store

SECTOR = 4096
DEPTH = {"queue_depth": 4, "block_bytes": 4 * SECTOR}


def memory(nbytes: int) -> torch.Tensor:
    """Poisoned, at a page boundary."""
    return ops.host_buffer(nbytes).fill_(0xEE)


def random_tensor(nbytes: int) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8)


def read(store: NvmeStore, offset: int, nbytes: int) -> torch.Tensor:
    tensor = memory(nbytes)
    store.read(offset, tensor).wait()
    return tensor


def in_child(work: Callable[[], None]) -> tuple[int, str]:
    """Exit code and text of ``work`` in a forked process, which does not run this one's exit handlers."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        code = 0
        try:
            torch.set_num_threads(1)  # the pool of threads did not follow into this process
            work()
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            code = 1
        os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


@pytest.fixture
def store(tmp_path: Path) -> Iterator[NvmeStore]:
    """Two devices, stripes of two sectors, 64 sectors, verified."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    with NvmeStore(paths, stripe_bytes=2 * SECTOR, checksum=True, reserve_bytes=64 * SECTOR, **DEPTH) as made:
        yield made


STEP = st.tuples(st.sampled_from(["allocate", "release", "write", "read"]), st.integers(0, 10**6))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(STEP, min_size=5, max_size=40),
    devices=st.integers(1, 3),
    stripe=st.integers(1, 3),
    checksum=st.booleans(),
)
def test_agrees_with_a_dict(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, int]],
    devices: int,
    stripe: int,
    checksum: bool,
) -> None:
    paths = [tmp_path_factory.mktemp("device") for _ in range(devices)]
    model: dict[int, torch.Tensor] = {}
    counted = {"read": 0, "written": 0}
    with NvmeStore(paths, stripe_bytes=stripe * SECTOR, checksum=checksum, **DEPTH) as store:
        store.reserve(30 * SECTOR)
        for kind, number in [("allocate", 5), *steps]:
            if kind == "allocate":
                nbytes = 1 + number % (8 * SECTOR)
                rounded = -(-nbytes // SECTOR) * SECTOR
                try:
                    offset = store.allocate(nbytes)
                except RuntimeError as error:
                    assert f"free range of {nbytes} bytes" in str(error)
                    assert sum(tensor.numel() for tensor in model.values()) + rounded > 0
                    continue
                for other, tensor in model.items():
                    assert offset + rounded <= other or other + tensor.numel() <= offset
                # What an extent holds before it is written is not promised.
                model[offset] = read(store, offset, rounded)
                counted["read"] += rounded
                continue
            if not model:
                continue
            offset = sorted(model)[number % len(model)]
            if kind == "release":
                store.release(offset)
                del model[offset]
                continue
            expected = model[offset]
            sectors = expected.numel() // SECTOR
            begin = number // 7 % sectors
            section = expected[begin * SECTOR : (begin + 1 + number // 11 % (sectors - begin)) * SECTOR]
            if kind == "write":
                section.copy_(random_tensor(section.numel()))
                store.write(offset + begin * SECTOR, section).wait()
                counted["written"] += section.numel()
            else:
                assert torch.equal(read(store, offset + begin * SECTOR, section.numel()), section)
                counted["read"] += section.numel()
        facts = store.facts()
    assert facts.live_bytes == sum(tensor.numel() for tensor in model.values())
    assert (facts.bytes_read, facts.bytes_written) == (counted["read"], counted["written"])
    assert facts.capacity == 30 * SECTOR
    assert [list(path.iterdir()) for path in paths] == [[]] * devices


def test_simultaneous_transfers_and_any_dtype(store: NvmeStore) -> None:
    tensors = [torch.rand(3, 1024), torch.rand(4096).bfloat16(), torch.arange(1024.0).double()]
    offsets = [store.allocate(tensor.nbytes) for tensor in tensors]
    for transfer in [store.write(*pair) for pair in zip(offsets, tensors, strict=True)]:
        transfer.wait()
    got = [torch.full_like(tensor, torch.nan) for tensor in tensors]
    for transfer in reversed([store.read(*pair) for pair in zip(offsets, got, strict=True)]):
        transfer.wait()
        transfer.wait()
    assert all(map(torch.equal, got, tensors))


def test_the_memory_of_a_dropped_tensor_lives_until_it_is_written(store: NvmeStore) -> None:
    offset = store.allocate(16 * SECTOR)
    expected = random_tensor(16 * SECTOR)
    transfer = store.write(offset, expected.clone())
    gc.collect()
    filler = [random_tensor(16 * SECTOR) for _ in range(10)]
    transfer.wait()
    assert torch.equal(read(store, offset, 16 * SECTOR), expected) and filler


def test_files_are_private_and_direct(store: NvmeStore) -> None:
    for device in store.facts().devices:
        assert device.path.stat().st_mode & 0o7777 == 0o600
        assert device.path.parent.stat().st_mode & 0o7777 == 0o700
        assert device.path.stat().st_size == 32 * SECTOR


@pytest.mark.parametrize("backend", ["threads", "auto"])
def test_backends_by_name(tmp_path: Path, backend: str) -> None:
    with NvmeStore([tmp_path], backend=backend, reserve_bytes=SECTOR) as store:
        assert store.facts().backend in (
            ["threads"] if backend == "threads" else ["io_uring", "libaio", "threads"]
        )
        assert torch.equal(read(store, store.allocate(1), SECTOR), torch.zeros(SECTOR, dtype=torch.uint8))


def test_what_auto_falls_back_to_is_logged_with_the_reason_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for reasons, lines in (
        ({"io_uring": "", "libaio": "", "threads": ""}, 0),
        ({"io_uring": "io_uring_setup: Operation not permitted", "libaio": "", "threads": ""}, 1),
    ):
        nvme_store._log_fallback.cache_clear()
        caplog.clear()
        monkeypatch.setattr(ops, "aio_backends", lambda found=reasons: found)
        for _ in range(2):
            NvmeStore([tmp_path]).close()
        assert len(caplog.messages) == lines
        assert not lines or "io_uring is not available: io_uring_setup: Operation not" in caplog.messages[0]
        NvmeStore([tmp_path], backend="threads").close()
        assert len(caplog.messages) == lines
    nvme_store._log_fallback.cache_clear()


def test_a_damaged_byte_is_named(store: NvmeStore) -> None:
    offset = store.allocate(4 * SECTOR)
    expected = random_tensor(4 * SECTOR)
    store.write(offset, expected).wait()
    path = store.facts().devices[1].path  # stripes 1, 3, ...: the third sector is its first
    with path.open("r+b") as file:
        file.seek(100)
        value = file.read(1)[0] ^ 0x40
        file.seek(100)
        file.write(bytes([value]))
    damaged = expected[2 * SECTOR : 3 * SECTOR].clone()
    wanted = ops.crc32c(damaged, 0)
    damaged[100] = value
    found = ops.crc32c(damaged, 0)
    transfer = store.read(offset, memory(4 * SECTOR))
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            transfer.wait()
        assert f"'{path}' at offset 0: " in str(caught.value)
        assert f"expected CRC32C 0x{wanted:08x}, got 0x{found:08x}" in str(caught.value)
    assert torch.equal(read(store, offset + 3 * SECTOR, SECTOR), expected[3 * SECTOR :])


@pytest.mark.parametrize("writing", [False, True])
@pytest.mark.parametrize("reason", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_errors_of_the_device_name_the_file(store: NvmeStore, writing: bool, reason: int) -> None:
    offset = store.allocate(8 * SECTOR)
    tensor = random_tensor(8 * SECTOR)
    transfer = store.write if writing else store.read
    ops.store_inject_fault(store.handle, writing, 2, -reason, 1)
    with pytest.raises(RuntimeError, match=rf"extents\.bin.*{os.strerror(reason)}"):
        transfer(offset, tensor).wait()
    store.write(offset, tensor).wait()
    assert torch.equal(read(store, offset, 8 * SECTOR), tensor)


@pytest.mark.parametrize("writing", [False, True])
@pytest.mark.parametrize("result", [-errno.EINTR, -errno.EAGAIN, 512, 3 * 512])
def test_what_can_be_continued_is(store: NvmeStore, writing: bool, result: int) -> None:
    offset = store.allocate(8 * SECTOR)
    tensor = random_tensor(8 * SECTOR)
    ops.store_inject_fault(store.handle, writing, 1, result, 1)
    store.write(offset, tensor).wait()
    assert torch.equal(read(store, offset, 8 * SECTOR), tensor)


def test_wrong_arguments_are_refused(store: NvmeStore, tmp_path: Path) -> None:
    offset = store.allocate(2 * SECTOR)
    with pytest.raises(RuntimeError, match="multiples of 4096"):
        store.write(offset, torch.zeros(100))
    with pytest.raises(RuntimeError, match="expected a range inside one allocated extent"):
        store.read(offset, memory(3 * SECTOR))
    with pytest.raises(RuntimeError, match="expected a contiguous tensor"):
        store.read(offset, torch.zeros(64, 32).t())
    with pytest.raises(RuntimeError, match="no extent starts at offset 4096"):
        store.release(offset + SECTOR)
    with pytest.raises(RuntimeError, match="as the largest"):
        store.allocate(65 * SECTOR)
    with pytest.raises(RuntimeError, match=f"'{tmp_path}/a/.*': it is listed twice"):
        NvmeStore([tmp_path / "b", tmp_path / "a", f"{tmp_path}/a/../a"])
    with pytest.raises(TypeError, match="a sequence of paths"):
        NvmeStore(str(tmp_path))
    with pytest.raises(RuntimeError, match=r"/absent': expected a directory, got .* does not exist"):
        NvmeStore([tmp_path / "a", Path("absent")])
    for options in ({"backend": "floppy"}, {"queue_depth": 0}, {"stripe_bytes": 1000}, {"block_bytes": 5}):
        with pytest.raises(RuntimeError, match=next(iter(options))):
            NvmeStore([tmp_path / "a"], **options)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="expected at least one path"):
        NvmeStore([])
    assert len(list((tmp_path / "a").iterdir())) == 1


def test_a_closed_store_is_named(store: NvmeStore) -> None:
    offset = store.allocate(SECTOR)
    transfer = store.write(offset, memory(SECTOR))
    store.close()
    store.close()
    for call in (store.facts, transfer.wait, lambda: store.read(offset, memory(SECTOR))):
        with pytest.raises(RuntimeError, match=f"handle {store.handle} is not open"):
            call()


AT_EXIT = """
import sys, torch
from zero_ext.offload import NvmeStore
store = NvmeStore([sys.argv[1]], reserve_bytes=1 << 22)
transfer = store.write(store.allocate(1 << 22), torch.ones(1 << 20))
raise ValueError("the training failed")
"""


def test_nothing_is_left_after_an_exception_during_a_transfer(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", AT_EXIT, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 1 and run.stderr.strip().endswith("the training failed"), run.stderr
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_after_a_kill_once_the_next_store_opens(tmp_path: Path) -> None:
    def work() -> None:
        store = NvmeStore([tmp_path], reserve_bytes=1 << 20)
        store.write(store.allocate(1 << 20), random_tensor(1 << 20))
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(work) == (-signal.SIGKILL, "")
    left = list(tmp_path.rglob("*.bin"))
    assert len(left) == 1 and left[0].stat().st_size == 1 << 20
    with NvmeStore([tmp_path]) as store:
        assert not left[0].exists() and store.facts().devices[0].path.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_neither_uses_nor_removes_the_store(store: NvmeStore) -> None:
    def work() -> None:
        with pytest.raises(RuntimeError, match="fork"):
            store.read(0, memory(SECTOR))
        store.close()

    offset = store.allocate(SECTOR)
    tensor = random_tensor(SECTOR)
    store.write(offset, tensor).wait()
    assert in_child(work) == (0, "")
    assert torch.equal(read(store, offset, SECTOR), tensor)


def test_a_file_system_that_is_too_small(tmp_path: Path) -> None:
    """On a small tmpfs mounted for a child process alone, or with a limit on file sizes."""

    def work() -> None:
        mounted = mount_small(tmp_path)
        if not mounted:
            limit_file_size()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(RuntimeError) as refused:
                NvmeStore([tmp_path], reserve_bytes=4 * CAPACITY)
            assert list(tmp_path.iterdir()) == []
            text = str(refused.value)
            assert f"reserving {4 * CAPACITY} bytes in '{tmp_path}/" in text
            free = re.search(r"(\d+) bytes are free there", text)
            assert free is not None and (not mounted or 0 < int(free[1]) <= CAPACITY), text
            with NvmeStore([tmp_path], reserve_bytes=CAPACITY // 4) as store:
                with pytest.raises(RuntimeError, match="free there"):
                    store.reserve(2 * CAPACITY)
                offset = store.allocate(CAPACITY // 4)
                tensor = random_tensor(CAPACITY // 4)
                store.write(offset, tensor).wait()
                assert torch.equal(read(store, offset, CAPACITY // 4), tensor)
                why = store.facts().devices[0].why_not_direct
        assert bool(why) == mounted == any("page cache" in str(one.message) for one in caught)

    assert in_child(work) == (0, "")


def loop_device(image: Path) -> str | None:
    """A loop device over ``image``, where this machine allows one."""
    run = subprocess.run(["losetup", "--find", "--show", image], capture_output=True, text=True, check=False)
    return run.stdout.strip() if run.returncode == 0 else None


def use_block_device(device: str) -> None:
    def write_and_crash() -> None:
        store = NvmeStore([device], block_devices=True, checksum=True, reserve_bytes=1 << 20)
        store.write(store.allocate(1 << 20), random_tensor(1 << 20)).wait()
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(write_and_crash) == (-signal.SIGKILL, "")
    with NvmeStore([device], block_devices=True, checksum=True, reserve_bytes=2 << 20) as store:
        tensor = random_tensor(2 << 20)
        offset = store.allocate(2 << 20)
        store.write(offset, tensor).wait()
        assert torch.equal(read(store, offset, 2 << 20), tensor)
        assert store.facts().devices[0].why_not_direct == ""
        with pytest.raises(RuntimeError, match=rf"'{device}': it is in use"):
            NvmeStore([device], block_devices=True)
        with pytest.raises(RuntimeError, match=rf"'{device}'.*expected room for .* got 2097152"):
            store.reserve((2 << 20) + 1)
    with Path(device).open("r+b") as file:
        assert not any(file.read(1 << 20))
        file.seek((4 << 20) - 1)
        file.write(b"x")
    with pytest.raises(RuntimeError, match=rf"'{device}': it holds data at offset {(4 << 20) - 1}"):
        NvmeStore([device], block_devices=True)


def test_block_devices(tmp_path: Path) -> None:
    """On a loop device; where there is none, what is no block device is refused all the same."""
    image = tmp_path / "image"
    image.write_bytes(bytes(4 << 20))
    with pytest.raises(RuntimeError, match=rf"'{image}': expected a block device"):
        NvmeStore([image], block_devices=True)
    device = loop_device(image)
    if device is not None:
        try:
            use_block_device(device)
        finally:
            subprocess.run(["losetup", "--detach", device], check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["image"]
